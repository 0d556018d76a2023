"""qimctl: what operators type.

Data go to standard output, messages to standard error; the exit code is the answer (0 done, 1 the answer is
no, 2 wrong usage, 69 nobody answers). `--json` prints the command's dictionary, whose keys are a contract; a
refusal is then an object too, with `error` and the exit code as `code`.
Anything that changes a mailbox or a log names its target, asks first unless `--yes` is given, and shows the
state again afterwards. Heavy modules are imported inside the commands, so that `--help` is quick.
"""

import sys
from collections.abc import Callable
from functools import partial
from os import urandom
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from qim.ctl import commands
from qim.errors import ControlError, ControlRefused, ExitCode, QimError

app = App(name="qimctl", help="Look after a qim server.", version_flags=[], help_format="plaintext")
mailbox_app = App(name="mailbox", help="Stopped mailbox shards: show, retry, skip, redeliver one record.")
outbox_app = App(
    name="outbox", help="Stopped Outbox partitions and slots of the writer: show, retry, skip one record."
)
membership_app = App(name="membership", help="Members of a group: add, remove, list.")
app.command(membership_app)
app.command(mailbox_app)
app.command(outbox_app)

Socket = Annotated[Path | None, Parameter(name="--socket", help="control socket of the admin process")]
DataDir = Annotated[Path | None, Parameter(name="--data-dir", help="data folder of qim dev")]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="print the result as one JSON object")]
Yes = Annotated[bool, Parameter(name="--yes", negative=(), help="do not ask")]
DryRun = Annotated[bool, Parameter(name="--dry-run", negative=(), help="say what would be done, do nothing")]
Slot = Annotated[int, Parameter(help="mailbox shard or Outbox partition, 0 to 63")]
Offset = Annotated[int, Parameter(help="offset of the record, as `show` prints it")]
Group = Annotated[str, Parameter(help="id of the group, 32 hexadecimal digits")]
Users = Annotated[str, Parameter(help="ids of users, 32 hexadecimal digits each, up to 500")]
Tenant = Annotated[int, Parameter(name="--tenant", help="whose group it is")]
Request = Annotated[
    str | None,
    Parameter(name="--request-id", help="32 hexadecimal digits: the same id again is the same change"),
]
Rest = Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]


@app.command
def status(*, socket: Socket = None, data_dir: DataDir = None, json: Json = False) -> int:
    """Whether the server is ready, its workers and stores, bytes per message and days left."""
    return _show(
        lambda: commands.status(commands.control_socket(socket, data_dir)), json=json, healthy="ready"
    )


@app.command
def slots(*, socket: Socket = None, data_dir: DataDir = None, json: Json = False) -> int:
    """Every slot: its worker, owner epoch, watermark, and whether it is stopped."""
    return _show(lambda: commands.slots(commands.control_socket(socket, data_dir)), json=json)


@app.command
def lag(*, socket: Socket = None, data_dir: DataDir = None, json: Json = False) -> int:
    """How many records each consumer is behind the end of its log."""
    return _show(lambda: commands.lag(commands.control_socket(socket, data_dir)), json=json)


@app.command
def init(*arguments: Rest) -> int:
    """Give empty stores their identity (the same as `qim init`)."""
    return commands.run_server_tool("init", arguments)


@app.command
def token(*arguments: Rest) -> int:
    """Make a connection token (the same as `qim token`)."""
    return commands.run_server_tool("token", arguments)


@app.command
def audit(*arguments: Rest) -> int:
    """The orphan audit: every acknowledged message is complete everywhere (the same as `qim audit`)."""
    return commands.run_server_tool("audit", arguments)


@mailbox_app.command(name="show")
def mailbox_show(*, socket: Socket = None, data_dir: DataDir = None, json: Json = False) -> int:
    """The shards that stopped, the record that stopped each, and why. Exit 1 when there is one."""
    return _show(
        lambda: commands.mailbox(commands.control_socket(socket, data_dir), "show"),
        json=json,
        empty=("stopped", "unfinished"),
    )


@mailbox_app.command(name="retry")
def mailbox_retry(slot: Slot, *, socket: Socket = None, data_dir: DataDir = None, json: Json = False) -> int:
    """Try the record that stopped the shard once more. Changes nothing else."""
    return _show(
        lambda: commands.mailbox(commands.control_socket(socket, data_dir), "retry", slot=slot), json=json
    )


@mailbox_app.command(name="skip")
def mailbox_skip(
    slot: Slot,
    offset: Offset,
    *,
    socket: Socket = None,
    data_dir: DataDir = None,
    json: Json = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> int:
    """Finish one record as skipped: its recipients do not get it unless it is redelivered."""
    return _act(
        "mailbox",
        "skip",
        slot,
        offset,
        place=lambda: commands.control_socket(socket, data_dir),
        json=json,
        yes=yes,
        dry_run=dry_run,
    )


@mailbox_app.command(name="redeliver")
def mailbox_redeliver(
    slot: Slot,
    offset: Offset,
    *,
    socket: Socket = None,
    data_dir: DataDir = None,
    json: Json = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> int:
    """Append a skipped record again, for the recipients who do not hold it."""
    return _act(
        "mailbox",
        "redeliver",
        slot,
        offset,
        place=lambda: commands.control_socket(socket, data_dir),
        json=json,
        yes=yes,
        dry_run=dry_run,
    )


@outbox_app.command(name="show")
def outbox_show(*, socket: Socket = None, data_dir: DataDir = None, json: Json = False) -> int:
    """The partitions whose fanout stopped, the record that stopped each, and why. Exit 1 if there is one."""
    return _show(
        lambda: commands.outbox(commands.control_socket(socket, data_dir), "show"),
        json=json,
        empty=("stopped", "unfinished"),
    )


@outbox_app.command(name="retry")
def outbox_retry(slot: Slot, *, socket: Socket = None, data_dir: DataDir = None, json: Json = False) -> int:
    """Try the record that stopped the partition once more."""
    return _show(
        lambda: commands.outbox(commands.control_socket(socket, data_dir), "retry", slot=slot), json=json
    )


@outbox_app.command(name="skip")
def outbox_skip(
    slot: Slot,
    offset: Offset,
    *,
    socket: Socket = None,
    data_dir: DataDir = None,
    json: Json = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> int:
    """Go on behind one record: nobody gets it. It stays in the Outbox for the log's retention."""
    return _act(
        "outbox",
        "skip",
        slot,
        offset,
        place=lambda: commands.control_socket(socket, data_dir),
        json=json,
        yes=yes,
        dry_run=dry_run,
    )


@membership_app.command(name="add")
def membership_add(
    group: Group,
    *users: Users,
    tenant: Tenant = 1,
    request_id: Request = None,
    socket: Socket = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> int:
    """Add users to a group. They see what is said from now on, and an event tells the members."""
    place = partial(commands.control_socket, socket, data_dir)
    return _change_members("add", group, users, tenant=tenant, request_id=request_id, place=place, json=json)


@membership_app.command(name="remove")
def membership_remove(
    group: Group,
    *users: Users,
    tenant: Tenant = 1,
    request_id: Request = None,
    socket: Socket = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> int:
    """Remove users from a group. They keep what they could see until now."""
    place = partial(commands.control_socket, socket, data_dir)
    return _change_members(
        "remove", group, users, tenant=tenant, request_id=request_id, place=place, json=json
    )


@membership_app.command(name="list")
def membership_list(
    group: Group,
    *,
    tenant: Tenant = 1,
    after: Annotated[str, Parameter(help="begin behind this user; `next` of the page before")] = "",
    limit: Annotated[int, Parameter(help="users on a page, at most 300")] = 300,
    socket: Socket = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> int:
    """Who is in a group, by id, and from which sequence on."""
    return _show(
        lambda: commands.membership(
            commands.control_socket(socket, data_dir), "list", tenant=tenant, group=group, after=after,
            limit=limit,
        ),
        json=json,
    )  # fmt: skip


def _change_members(
    action: str,
    group: str,
    users: tuple[str, ...],
    *,
    tenant: int,
    request_id: str | None,
    place: Callable[[], Path],
    json: bool,
) -> int:
    """Says under which id to repeat it, before it is done: an answer may be lost."""
    if request_id is None:
        request_id = urandom(16).hex()
        print(f"--request-id {request_id}", file=sys.stderr)
    return _show(
        lambda: commands.membership(
            place(), action, tenant=tenant, group=group, users=list(users), request_id=request_id
        ),
        json=json,
    )


def _act(
    what: str,
    action: str,
    slot: int,
    offset: int,
    *,
    place: Callable[[], Path],
    json: bool,
    yes: bool,
    dry_run: bool,
) -> int:
    """A change that cannot be undone: named, confirmed, then the state is read again."""
    ask = {"mailbox": commands.mailbox, "outbox": commands.outbox}[what]
    target = f"{what} {action}: slot {slot}, offset {offset}"
    if dry_run:
        print(f"would do: {target}", file=sys.stderr)
        return _show(lambda: ask(place(), "show"), json=json)
    if not yes:
        try:
            _confirm(target, lambda: _check_target(ask(place(), "show"), action, slot, offset))
        except ControlError as error:
            return _refuse(str(error), error.exit_code, json=json)
    done = _show(lambda: ask(place(), action, slot=slot, offset=offset), json=json)
    if done == ExitCode.OK and not json:
        _show(lambda: ask(place(), "show"), json=False)
    return done


def _confirm(target: str, check: Callable[[], None]) -> None:
    """Raises ControlRefused unless a person agrees; nobody is asked about what would be refused anyway."""
    if not sys.stdin.isatty():
        raise ControlRefused(f"{target}: nothing was done; give --yes to do this without a terminal")
    check()
    # Not on standard output, where a program that gave --json reads.
    print(f"{target}. Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if input().strip().lower() != "y":
        raise ControlRefused("nothing was done")


def _check_target(shown: dict[str, Any], action: str, slot: int, offset: int) -> None:
    """The server has the last word; this spares a question whose answer does not matter."""
    stopped = {row["slot"]: row["offset"] for row in shown["stopped"]}
    at = stopped.get(slot)
    if action == "skip" and slot not in stopped:
        raise ControlRefused(f"slot {slot} is not stopped")
    if action == "skip" and at is not None and at != offset:
        raise ControlRefused(f"slot {slot} stands at {at}, not at {offset}")
    if action == "redeliver" and at is not None and at <= offset:
        raise ControlRefused(f"slot {slot} has not passed {offset} yet, it stands at {at}")


def _show(
    command: Callable[[], dict[str, Any]],
    *,
    json: bool,
    healthy: str | None = None,
    empty: tuple[str, ...] = (),
) -> int:
    """Prints a result. Exit 1 when `healthy` is false, or something that must be `empty` is not."""
    from qim.ctl import render

    try:
        result = command()
    except ControlError as error:
        return _refuse(str(error), error.exit_code, json=json)
    except QimError as error:
        return _refuse(str(error), ExitCode.NO, json=json)
    if json:
        print(render.to_json(result))
    else:
        render.show(result, console=render.open_console())
    unhealthy = (healthy is not None and not result.get(healthy)) or any(map(result.get, empty))
    return ExitCode.NO if unhealthy else ExitCode.OK


def _refuse(text: str, code: int, *, json: bool) -> int:
    """One line for people; a program that reads JSON gets the same as an object. Returns the exit code."""
    from qim.ctl import render

    print(f"qimctl: {text}", file=sys.stderr)
    if json:
        print(render.to_json({"schema": 1, "error": text, "code": int(code)}))
    return code


def main() -> None:
    """Entry point of `qimctl`; wrong usage is one line."""
    try:
        code = app(sys.argv[1:], exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        text = f"{' '.join(str(error).split())} (--help tells more)"
        code = _refuse(text, ExitCode.USAGE, json="--json" in sys.argv)
    except KeyboardInterrupt:
        code = ExitCode.NO
    sys.exit(code or ExitCode.OK)
