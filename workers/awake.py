"""Processors that do not sleep while the server runs: `server.keep_awake`.

A processor that has nothing to do sleeps, and wakes up cold: on a host of one's own its deeper states empty
the caches, in a virtual machine another guest had the core meanwhile. At a thousand messages a second a
server sleeps between two of them. The kernel's promise for this is a file: as long as somebody holds
`/dev/cpu_dma_latency` open with a 0 in it, idle processors spin (Documentation/power/pm_qos_interface.rst of
Linux). What it costs is electricity, and, where processors are shared, the time of the neighbours, so nobody
gets it unasked.

The supervisor holds it and its children inherit it; the promise ends with the last of them, however they end.
"""

import os
import struct
from pathlib import Path
from typing import Final

from qim.errors import ConfigError

DEVICE: Final = Path("/dev/cpu_dma_latency")
NO_LATENCY: Final = struct.pack("@i", 0)
"""Microseconds that waking up may take, as the kernel reads it: an int of the machine."""


def keep_awake(device: Path = DEVICE) -> int:
    """Asks the kernel; returns the descriptor that keeps the promise. Raises ConfigError when it may not."""
    descriptor = -1
    try:
        descriptor = os.open(device, os.O_WRONLY | os.O_CLOEXEC)
        os.write(descriptor, NO_LATENCY)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise ConfigError(
            [f"server.keep_awake: {device}: {error.strerror}; make it writable or set the key to false"]
        ) from error
    return descriptor
