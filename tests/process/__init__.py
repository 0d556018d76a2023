"""The real processes, really forked: signals, kill -9, stuck loops, drain.

They start whole servers in temporary folders and stop every process they started, by its id.
"""
