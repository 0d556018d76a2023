"""`qim`: the command line of the server. `python -m workers` is the same.

Data go to standard output, messages to standard error; a refusal is one line, and the exit code says which
kind it was (`qim.errors.ExitCode`); with `--json` it is also an object with `error` and `code`. Heavy modules
are imported inside the commands: `--help` must be quick.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, CycloptsError, Parameter, validators

from qim.errors import ConfigError, ExitCode, GuardRefused, QimError, StoreError

if TYPE_CHECKING:
    from qim.config import Config as Tree

app = App(name="qim", help="A durable instant-messaging server.", version_flags=[], help_format="plaintext")
config_app = App(name="config", help="Look at the configuration: check, show.")
app.command(config_app)

DEFAULT_CONFIG = Path("/etc/qim/qim.toml")

Config = Annotated[
    Path | None,
    Parameter(name="--config", help="configuration file; default /etc/qim/qim.toml where it exists"),
]
Set = Annotated[
    tuple[str, ...],
    Parameter(name="--set", negative=(), help="section.key=value above the file, value in TOML; repeatable"),
]
Profile = Annotated[str, Parameter(name="--profile", help="tuning profile, or auto")]
DataDir = Annotated[Path, Parameter(name="--data-dir", help="folder that keeps everything")]
ToolDataDir = Annotated[
    Path | None, Parameter(name="--data-dir", help="data folder of qim dev; default .qim-dev where it exists")
]
Port = Annotated[int, Parameter(name="--port", help="TCP port for clients; 0 lets the kernel choose")]
Workers = Annotated[int | None, Parameter(name="--workers", help="worker processes; default by the profile")]
RedisServer = Annotated[
    Path | None, Parameter(name="--redis-server", help="a Redis or Valkey server to use as the store")
]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="one JSON object on standard output")]

DEV_DIR = Path(".qim-dev")
DEV_PORT = 7443


@app.command
def serve(
    *,
    config: Config = None,
    set_: Set = (),
    profile: Profile = "auto",
    take_over: Annotated[
        bool,
        Parameter(negative=(), help="claim slots although their last owner did not release them: it is dead"),
    ] = False,
) -> int:
    """Run the server until it is told to stop."""
    from workers.serve import Command, serve

    return serve(
        Command(path=_path(config), profile=profile, overrides=_overrides(set_), take_over=take_over)
    )  # fmt: skip


@app.command
def dev(
    *,
    data_dir: DataDir = DEV_DIR,
    port: Port = DEV_PORT,
    workers: Workers = None,
    redis_server: RedisServer = None,
    demo: Annotated[bool, Parameter(negative=(), help="let two users talk and check everything")] = False,
    once: Annotated[bool, Parameter(negative=(), help="end after the demo, with its exit code")] = False,
    json: Json = False,
) -> int:
    """Run everything on this box, store included; needs nothing and nobody else."""
    from workers.dev import DevOptions, dev

    return dev(
        DevOptions(
            data_dir=data_dir,
            port=port,
            workers=workers,
            redis_server=redis_server,
            demo=demo or once,
            once=once,
            json=json,
        )
    )


@app.command
def demo(
    *,
    data_dir: DataDir = DEV_DIR,
    port: Port = DEV_PORT,
    workers: Workers = None,
    redis_server: RedisServer = None,
    json: Json = False,
) -> int:
    """The same as `qim dev --demo --once`."""
    return dev(
        data_dir=data_dir, port=port, workers=workers, redis_server=redis_server, once=True, json=json
    )  # fmt: skip


@app.command
def init(*, config: Config = None, set_: Set = (), json: Json = False) -> int:
    """Give empty stores their identity. Safe to repeat; refuses the stores of another deployment."""
    import os

    from qim.config_checks import read_secret
    from workers.init import initialise

    loaded = _load(config, set_)
    written = initialise(loaded, password=read_secret(loaded.redis.password, environ=os.environ))
    if json:
        _print_json({"schema": 1, "deployment": loaded.server.deployment, "written": written})
        return ExitCode.OK
    for line in written or ["every store has its identity already"]:
        print(line)
    return ExitCode.OK


@app.command
def token(
    user: Annotated[str, Parameter(help="32 hexadecimal digits, or the name of a user of qim dev")],
    *,
    tenant: Annotated[int, Parameter(help="number of the tenant")] = 1,
    device: Annotated[str | None, Parameter(help="good for this device only; 32 hexadecimal digits")] = None,
    days: Annotated[int, Parameter(help="how long it is good")] = 30,
    key: Annotated[
        Path | None, Parameter(help="PEM file with the Ed25519 private key; default that of the dev folder")
    ] = None,
    kid: Annotated[str | None, Parameter(help="id of the key in the server's auth.keys")] = None,
    data_dir: ToolDataDir = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Make a connection token; it alone is printed."""
    from qim.clock import SystemClock
    from workers.token import TokenOrder, make_token

    loaded = _load(_tool_path(config, data_dir), ())
    order = TokenOrder(
        user=user,
        tenant=tenant,
        device=device,
        days=days,
        key=key or (data_dir or DEV_DIR) / "token-key.pem",
        kid=kid,
    )
    made = make_token(order, loaded, clock=SystemClock())
    if json:
        _print_json(made)
    else:
        print(made["token"])
    return ExitCode.OK


@app.command
def audit(
    *,
    config: Config = None,
    set_: Set = (),
    data_dir: ToolDataDir = None,
    findings_max: Annotated[
        int, Parameter(help="findings listed; the rest is counted", validator=validators.Number(gte=0))
    ] = 50,
    json: Json = False,
) -> int:
    """Check that every acknowledged message is complete everywhere. Exit 1 when something was found."""
    from workers.audit_command import audit

    return audit(_load(_tool_path(config, data_dir), set_), findings_max=findings_max, as_json=json)


@app.command
def version(*, json: Json = False) -> int:
    """The version of the package and of the protocol."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    from qim.wire.layout import PROTOCOL_VERSION

    try:
        package = version_of("qim")
    except PackageNotFoundError:
        package = "not installed"
    if json:
        _print_json({"schema": 1, "version": package, "protocol": PROTOCOL_VERSION})
    else:
        print(f"qim {package}, protocol {PROTOCOL_VERSION}")
    return ExitCode.OK


@config_app.command
def check(*, config: Config = None, set_: Set = (), json: Json = False) -> int:
    """Every problem of the configuration and of the files it names, at once. Exit 78 when there is one."""
    import os

    from qim.config_checks import check_files
    from workers.reload import reload_of
    from workers.serve import make_verifier

    problems: list[str] = []
    try:
        loaded = _load(config, set_)
        problems = check_files(loaded, environ=os.environ)
        if not problems:
            make_verifier(loaded)
            reload_of(loaded, os.environ).make_context()
    except ConfigError as error:
        problems = list(error.problems)
    if json:
        _print_json({"schema": 1, "ok": not problems, "problems": problems})
    else:
        for problem in problems:
            print(problem, file=sys.stderr)
        if not problems:
            print("the configuration is good")
    return ExitCode.CONFIG if problems else ExitCode.OK


@config_app.command
def show(
    *,
    config: Config = None,
    set_: Set = (),
    origin: Annotated[bool, Parameter(negative=(), help="where each value comes from")] = False,
    json: Json = False,
) -> int:
    """The values in force. Secrets are only named, never read."""
    from qim.config import describe

    rows = describe(_load(config, set_))
    if json:
        _print_json(
            {"schema": 1, "config": [dict(zip(("key", "value", "origin"), row, strict=True)) for row in rows]}
        )
        return ExitCode.OK
    for key, value, source in rows:
        print(f"{key} = {value}" + (f"    # {source}" if origin else ""))
    return ExitCode.OK


def _path(given: Path | None) -> Path | None:
    """No file is fine only when nobody named one: everything has a default."""
    if given is not None:
        return given
    return DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None


def _tool_path(given: Path | None, data_dir: Path | None) -> Path | None:
    """Tools look at the development server of this folder first, as qimctl does."""
    if given is not None:
        return given
    development = (data_dir or DEV_DIR) / "qim.toml"
    if data_dir is not None and not development.exists():
        raise ConfigError([f"--data-dir {data_dir}: no folder of qim dev, it holds no qim.toml"])
    return development if development.exists() else None


def _load(given: Path | None, sets: tuple[str, ...]) -> "Tree":
    from workers.serve import Command, read_config

    return read_config(Command(path=_path(given), profile="auto", overrides=_overrides(sets)))[0]


def _overrides(sets: tuple[str, ...]) -> Mapping[str, object]:
    import tomllib

    found: dict[str, object] = {}
    problems = []
    for text in sets:
        key, equals, value = text.partition("=")
        try:
            # A bare word is a text: nobody wants to quote quotes for a shell.
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value
        if not equals or not key:
            problems.append("--set wants section.key=value")
        found[key] = parsed
    if problems:
        raise ConfigError(problems)
    return found


def _print_json(result: Mapping[str, object]) -> None:
    import json

    print(json.dumps(result))


def _refuse(problems: Sequence[str], code: int, *, as_json: bool) -> int:
    """A line per problem for people; a program that reads JSON gets an object too. Returns the exit code."""
    for problem in problems:
        print(f"qim: {problem}", file=sys.stderr)
    if as_json:
        _print_json({"schema": 1, "error": "; ".join(problems), "code": int(code)})
    return code


def main(arguments: list[str] | None = None) -> None:
    """The entry point; ends the process with the exit code of the command."""
    given = sys.argv[1:] if arguments is None else arguments
    refuse = partial(_refuse, as_json="--json" in given)
    try:
        code = app(given, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, `head` for example, has seen enough; the interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = ExitCode.NO
    except CycloptsError as error:
        code = refuse([f"{' '.join(str(error).split())} (--help tells more)"], ExitCode.USAGE)
    except ConfigError as error:
        code = refuse(error.problems, ExitCode.CONFIG)
    except GuardRefused as error:
        code = refuse([str(error)], error.exit_code)
    except StoreError as error:
        code = refuse([str(error)], ExitCode.UNREACHABLE)
    except QimError as error:
        code = refuse([str(error)], ExitCode.NO)
    except KeyboardInterrupt:
        code = ExitCode.NO
    sys.exit(code or ExitCode.OK)


if __name__ == "__main__":
    main()
