"""Faults that are made on purpose, and the rows of the fault matrix that use them.

Each tool is one small module, and each has a test that shows that its fault really strikes: a proxy between
two programs (`proxy.py`), system calls that are slow or fail (`strace.py`), power loss (`power_loss.py`), a
clock that jumps (`shifted_clock.py`), processes and clients that stand still (`pausing.py`). `wrapped.py`
puts a tool around a server, `compiled.py` builds the two C files, `deployment.py` is a service with its load.

None of it needs a kernel module or traffic control. What a machine lacks skips its tests with the reason, and
fails them under `CI=true`.
"""
