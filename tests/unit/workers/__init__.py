"""The roles on a stock loop with memory adapters and a clock moved by hand.

`rig.py` holds what they share: stores and logs that survive, and roles that are dropped and built anew, as a
kill and a restart would.
"""
