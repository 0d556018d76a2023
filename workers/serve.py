"""`qim serve`: everything between the command line and the supervisor's loop.

    1  MALLOC_* of the profile missing → set and exec once: glibc reads them only at exec
    2  configuration, files, keys, password: all problems at once, exit 78
    3  descriptor limit, runtime folder, listening sockets, TLS context, shared page
    4  everything that children need is imported and frozen, then the supervisor runs

What children get are frozen plain values and objects without a thread or a connection; that is asserted
before each fork. `python -O` is refused: it would remove the assertions that correctness leans on.
"""

import fcntl
import os
import random
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from structlog import get_logger

from qim.clock import SystemClock
from qim.config import Config, Secret, load_config
from qim.config_checks import check_files, read_secret
from qim.config_sources import changes_for_restart
from qim.ctl.tune import Profile, are_stores_local, load_profile, read_host
from qim.domain.placement import Placement
from qim.domain.supervisor import WatchLimits
from qim.errors import ConfigError
from qim.ids import WorkerId
from qim.logsetup import configure_logging, set_reference_key
from qim.metrics import SNAPSHOT_BYTES
from qim.tokens import TokenVerifier
from workers.admin import AdminJob, run_admin
from workers.awake import keep_awake
from workers.failpoints import failpoints_from_environment
from workers.heartbeat import HeartbeatPage
from workers.listeners import Listeners
from workers.notify import Notifier
from workers.reload import forget_reload, reload_of, write_reload
from workers.supervisor import ChildPlan, Supervisor
from workers.wiring import load_scripts
from workers.worker import WorkerJob, run_worker

EXECUTED: Final = "QIM_EXECUTED_ONCE"
"""Set across the exec, so that a variable that does not stick cannot make a loop."""
DESCRIPTORS_SPARE: Final = 512
"""Besides client connections: links, stores, files."""
ADMIN: Final = "admin"

log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The command line of `serve`, kept for reloads."""

    path: Path | None
    profile: str
    overrides: Mapping[str, object]
    take_over: bool = False


def serve(command: Command) -> int:
    """Runs the service; returns its exit code. Raises ConfigError before anything is started."""
    refuse_optimised()
    config, profile = read_config(command)
    _execute_once(profile)
    problems = check_files(config, environ=os.environ)
    if problems:
        raise ConfigError(problems)
    configure_logging(level=config.log.level, log_format=config.log.format, process="supervisor")
    # Before the fork: the children inherit it.
    sys.setswitchinterval(profile.switch_interval_seconds)
    set_reference_key(read_secret(config.log.reference_key, environ=os.environ).reveal())
    password = read_secret(config.redis.password, environ=os.environ)
    _occupy_folder(Path(config.server.runtime_dir))
    if config.server.keep_awake:
        keep_awake()
        log.info("processors_kept_awake")
    forget_reload(config)
    workers = worker_count(config, profile)
    _raise_descriptor_limit(config.gateway.connections_max + DESCRIPTORS_SPARE)
    listeners = Listeners(
        address=config.gateway.address,
        port=config.gateway.port,
        count=workers,
        backlog=config.gateway.backlog,
    )
    plans = _plan_children(command, config, profile, workers=workers, listeners=listeners, password=password)
    supervisor = Supervisor(
        plans,
        page=HeartbeatPage(children=len(plans), snapshot_bytes=SNAPSHOT_BYTES),
        listeners=listeners,
        notifier=Notifier.from_environment(os.environ),
        clock=SystemClock(),
        jitter=random.random,
        watch=WatchLimits(drain_ms=config.server.drain_timeout_ms),
        on_reload=lambda: _accept_reload(command, config),
    )
    return supervisor.run()


def read_config(command: Command) -> tuple[Config, Profile]:
    """Configuration and profile; raises ConfigError with every problem."""
    host = read_host()
    # Whether the stores share our CPUs decides the profile, and the profile is a layer below: read twice.
    first = _load(command, None)
    local = are_stores_local([*first.redis.core, *first.mailbox_urls, first.log_url])
    profile = load_profile(command.profile, host=host, redis_local=local)
    return _load(command, profile), profile


def worker_count(config: Config, profile: Profile) -> int:
    """How many workers this host runs."""
    return profile.workers if config.server.workers == "auto" else config.server.workers


def refuse_optimised() -> None:
    """Assertions are part of the server."""
    if not __debug__:
        raise ConfigError(["python -O removes the assertions that qim relies on; start it without -O"])


def _load(command: Command, profile: Profile | None) -> Config:
    return load_config(
        command.path,
        profile=None if profile is None else profile.config,
        profile_name="" if profile is None else profile.name,
        overrides=command.overrides,
        environ=os.environ,
    )


def _execute_once(profile: Profile) -> None:
    missing = profile.missing_environment(os.environ)
    if missing and EXECUTED not in os.environ:
        os.environ |= missing
        os.environ[EXECUTED] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - the same command again
    os.environ.pop(EXECUTED, None)


def _plan_children(
    command: Command,
    config: Config,
    profile: Profile,
    *,
    workers: int,
    listeners: Listeners,
    password: Secret,
) -> list[ChildPlan]:
    placement = Placement(workers, len(config.redis.core), len(config.mailbox_urls))
    cpus = (config.server.cpus or profile.plan.workers) if config.server.pin else ()
    allowed = os.sched_getaffinity(0)
    if not allowed.issuperset(cpus):
        raise ConfigError([f"server.cpus: not allowed for this process; allowed: {sorted(allowed)}"])
    job = WorkerJob(
        config=config,
        placement=placement,
        scripts=load_scripts(),
        tokens=make_verifier(config),
        tls=reload_of(config, os.environ).make_context(),
        failpoints=failpoints_from_environment(os.environ, enabled=config.test.failpoints),
        password=password,
        supervisor=os.urandom(16),
        cpus=cpus,
        housekeeping=tuple(sorted(allowed - set(cpus) or allowed)),
        take_over=command.take_over,
    )
    listeners.open_all()
    admin = AdminJob(config=config, placement=placement, port=listeners.port, first_worker=1)
    return [
        ChildPlan(name=ADMIN, entry=partial(run_admin, admin), ends_last=True),
        *(
            ChildPlan(name=f"worker-{worker}", entry=partial(run_worker, job, WorkerId(worker)), listens=True)
            for worker in range(workers)
        ),
    ]


def make_verifier(config: Config) -> TokenVerifier:
    """The public keys of the configuration; raises ConfigError for one that is not."""
    keys = {kid: Path(path).read_bytes() for kid, path in config.auth.keys.items()}
    return TokenVerifier(
        keys, issuer=config.auth.issuer, audience=config.auth.audience, clock=SystemClock()
    )  # fmt: skip


def _accept_reload(command: Command, running: Config) -> None:
    fresh, _ = read_config(command)
    problems = check_files(fresh, environ=os.environ)
    if problems:
        raise ConfigError(problems)
    reload = reload_of(fresh, os.environ)
    reload.make_context()
    write_reload(running, reload)
    waiting = changes_for_restart(running, fresh)
    if waiting:
        log.warning("config_needs_restart", keys=", ".join(waiting))


def _occupy_folder(folder: Path) -> None:
    """Makes the folder of sockets and locks it: a second service in it would take the sockets of the first.

    The lock is inherited by every child and ends with the last of them.
    """
    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            [f"server.runtime_dir: {folder} is in use by another qim; stop it or choose another folder"]
        ) from error
    except OSError as error:
        raise ConfigError([f"server.runtime_dir: {folder}: {error.strerror}"]) from error


def _raise_descriptor_limit(wanted: int) -> None:
    """As far as it goes; the gateway's own limit keeps below what is missing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        log.info("descriptor_limit_raised", before=soft, now=wanted)
