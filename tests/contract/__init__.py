"""One suite per port, run over every adapter of that port.

The memory twins pass the same suites as the real stores, which is what allows the simulation to stand in for
them.
"""
