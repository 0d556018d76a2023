"""The processes: what runs, in which order, on which CPU.

A file here does what its twin in `qim/domain` decides; a file without a twin decides nothing. The supervisor
forks every process and knows nothing of chat; a worker owns a contiguous range of slots and shares nothing
with its neighbours but messages.
"""
