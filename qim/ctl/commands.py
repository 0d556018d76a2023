"""What qimctl asks of a running server: one function per command, each returns a plain dictionary.

Nothing is decided here. A command travels to the admin process over its control socket, the admin process
asks the workers that own the slots, and what comes back is the answer of the process that would have to act
on it. Commands that work without a server (`init`, `token`, `audit`) run as a process of `qim`, because only
`qim` speaks to stores; standard output and exit code pass through unchanged.

Where the socket is: `--socket`, else in the folder of `--data-dir`, else the environment variable
QIM_CONTROL_SOCKET, else the first of `.qim-dev/run/control.sock` and `/run/qim/control.sock` that exists.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from qim.ctl import protocol
from qim.errors import ControlUnreachable

SOCKET_VARIABLE: Final = "QIM_CONTROL_SOCKET"
DEV_SOCKET: Final = "run/control.sock"
"""Inside the data folder of `qim dev`."""
SOCKET_PLACES: Final = (Path(".qim-dev", DEV_SOCKET), Path("/run/qim/control.sock"))

Result = dict[str, Any]


def control_socket(given: Path | None, data_dir: Path | None = None) -> Path:
    """The socket of the admin process. Raises ControlUnreachable, naming every place, when none exists.

    Links are followed here: the folder of sockets may be a link to a place with a shorter path, and only the
    shorter one fits into a socket address.
    """
    if given is not None:
        return given
    if data_dir is not None:
        return (data_dir / DEV_SOCKET).resolve()
    named = os.environ.get(SOCKET_VARIABLE)
    if named:
        return Path(named)
    found = next((place.resolve() for place in SOCKET_PLACES if place.exists()), None)
    if found is None:
        places = " or ".join(map(str, SOCKET_PLACES))
        raise ControlUnreachable(
            f"nothing answers at {places}: is qim running? `make run` starts it here; "
            "--socket or --data-dir name another one"
        )
    return found


def ask(socket: Path, command: str, arguments: Mapping[str, Any] | None = None) -> Result:
    """Raises ControlError (exit 69 where nobody answers, 1 or 2 where the server says no)."""
    return protocol.call(socket, command, dict(arguments or {}))


def status(socket: Path) -> Result:
    """Ready or not and why, each worker, each store with bytes per message and days left."""
    return ask(socket, "status")


def slots(socket: Path) -> Result:
    """Each slot: worker, epoch, watermark, whether it is stopped."""
    return ask(socket, "slots")


def lag(socket: Path) -> Result:
    """How far each consumer of each log is behind its end, in records."""
    return ask(socket, "lag")


def mailbox(socket: Path, action: str, *, slot: int | None = None, offset: int | None = None) -> Result:
    """`show` lists stopped mailbox shards; `retry`, `skip`, `redeliver` act on one record of one shard."""
    return ask(socket, f"mailbox.{action}", _given(slot=slot, offset=offset))


def outbox(socket: Path, action: str, *, slot: int | None = None, offset: int | None = None) -> Result:
    """`show` lists stopped Outbox partitions; `retry` and `skip` act on the record that stopped one."""
    return ask(socket, f"outbox.{action}", _given(slot=slot, offset=offset))


def membership(socket: Path, action: str, *, tenant: int, group: str, **values: Any) -> Result:
    """`add` and `remove` change the members of a group under a request id; `list` gives a page of them."""
    return ask(socket, f"membership.{action}", {"tenant": tenant, "group": group, **values})


def run_server_tool(command: str, arguments: Sequence[str]) -> int:
    """Runs `qim COMMAND …` as a process; its output is ours, its exit code is returned."""
    return subprocess.run([sys.executable, "-m", "workers", command, *arguments], check=False).returncode


def _given(**values: int | None) -> Result:
    return {name: value for name, value in values.items() if value is not None}
