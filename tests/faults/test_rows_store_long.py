"""Fault rows of the store that take long: power loss, flushes that fail or stall, full disks, weak settings.

Each runs on a service of its own whose store is started with a tool around it, shows that its fault struck,
and asks for the verdict from outside. One row must fail: with the guards off and flushes that stall, what was
acknowledged is lost, and a verdict that does not see it would be worth nothing. Run by `make test-long`.
"""

import errno
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.faults.deployment import (
    Steady,
    build_load,
    copied_load,
    count_acks,
    judge,
    proxied_service,
    service_on,
    store_socket,
)
from tests.faults.pausing import ask_store, kill9, pause_clients
from tests.faults.power_loss import DiskWatch, Instant
from tests.faults.proxy import Faults
from tests.faults.strace import Strace
from tests.faults.wrapped import write_wrapper
from tests.process.load import Load
from tests.services.dev_server import DevServer
from tests.waiting import eventually, happens

STALL_SECONDS: Final = 2.5
PAUSE_MS: Final = 2_500
EVERYSEC: Final = {"appendfsync": "everysec"}
LOSS: Final = (
    "acknowledged message|share a sequence|another sequence|changed its coordinates|a gap in history"
)
FAILING_FLUSH: Final = 600
"""Counted from the start of the store; the start of the service takes less than half of them."""
HELD_BACK_BYTES: Final = 50_000
RANDOM_INSTANTS: Final = 3
SAVE_DELAY_MICROSECONDS: Final = 300
FULL_DISK_BYTES: Final = 24 * 1024 * 1024
FULL_FILE_BLOCKS: Final = 2_000
"""Of 512 bytes: one megabyte of append-only file."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]


# --- F-10: power loss ---


class Acknowledged:
    """What was acknowledged until an instant of the disk, taken again and again while the load runs."""

    def __init__(self, load: Load, watch: DiskWatch) -> None:
        self._load, self._watch = load, watch
        self.moments: list[tuple[Instant, list[frozenset[bytes]]]] = []

    def note(self) -> None:
        """Acknowledgements first: what they waited for stands in the notes already."""
        known = [frozenset(account.acks) for pair in self._load.pairs for account in pair]
        self.moments.append((self._watch.now(), known))


async def _load_with_rewrite(server: DevServer, load: Load, watch: DiskWatch) -> Acknowledged:
    seen = Acknowledged(load, watch)
    socket = store_socket(server)
    async with Steady(load) as steady:
        for _ in range(5):
            await steady.progresses(by=40)
            seen.note()
        ask_store(socket, "CONFIG", "SET", "rdb-key-save-delay", SAVE_DELAY_MICROSECONDS)
        ask_store(socket, "BGREWRITEAOF")
        while ask_store(socket, "INFO", "persistence")["aof_rewrite_in_progress"]:
            await steady.progresses(by=5)
            seen.note()
        await steady.progresses(by=40)
        seen.note()
    return seen


async def _judge_image(
    watch: DiskWatch, instant: Instant, known: list[frozenset[bytes]], load: Load, *, dead: Path, folder: Path
) -> None:
    """A copy of the dead service on the disk of that instant holds what was acknowledged by then."""
    shutil.copytree(dead, folder / "dev", ignore=shutil.ignore_patterns("store", "run", "dev.json"))
    watch.write_image(instant, folder / "dev" / "store")
    with DevServer(folder) as server:
        copy = copied_load(load, server, known)
        await judge(server, copy)


@pytest.mark.shows("F-10", "C2", "C10")
async def test_a_power_loss_at_any_instant_loses_nothing_acknowledged(
    valkey_binary: str, tmp_path: Path
) -> None:
    watch = DiskWatch(tmp_path / "watch", valkey_binary)
    server = service_on(watch.server, tmp_path)
    with server:
        load = build_load(server)
        seen = await _load_with_rewrite(server, load, watch)
    rewriting = [moment for moment in seen.moments if watch.state_at(moment[0]).is_rewriting]
    assert rewriting, "no acknowledgement fell into the rewrite"
    chance = random.Random(10)
    chosen = [*chance.sample(seen.moments, RANDOM_INSTANTS), *chance.sample(rewriting, 2)]
    lost_by_cut = 0
    for number, (instant, known) in enumerate(chosen):
        folder = tmp_path / f"image-{number}"
        await _judge_image(watch, instant, known, load, dead=server.folder, folder=folder)
        lost_by_cut += count_acks(load) - sum(map(len, known))
    assert lost_by_cut > 0, "every image was of the end"


# --- F-09: the verdict can fail ---


def _store_that_flushes_late(folder: Path, valkey_binary: str) -> Strace:
    weak = write_wrapper(folder / "weak-server", valkey_binary, settings=EVERYSEC)
    # The first ones of each thread pass, or the start alone would take a quarter of a minute.
    return Strace(folder, str(weak), faults=[f"fdatasync:delay_enter={STALL_SECONDS * 1e6:.0f}:when=4+"])


def _held_back(server: DevServer) -> int:
    """Bytes of acknowledged writes that are in the store's memory only, because a flush is under way."""
    facts = ask_store(store_socket(server), "INFO", "persistence")
    return int(facts["aof_buffer_length"]) if facts["aof_pending_bio_fsync"] else 0


@pytest.mark.shows("F-09", "C10")
def test_with_the_guard_on_a_store_that_flushes_late_is_refused(valkey_binary: str, tmp_path: Path) -> None:
    weak = write_wrapper(tmp_path / "weak-server", valkey_binary, settings=EVERYSEC)
    with pytest.raises(AssertionError, match="appendfsync is 'everysec', must be 'always'"):
        service_on(weak, tmp_path).start()


@pytest.mark.shows("F-09", "C10")
async def test_with_the_guard_off_a_kill_loses_what_was_acknowledged_and_the_verdict_says_so(
    valkey_binary: str, tmp_path: Path
) -> None:
    strace = _store_that_flushes_late(tmp_path, valkey_binary)
    with service_on(strace.server, tmp_path, module="tests.faults.unguarded") as server:
        load = build_load(server)
        async with Steady(load) as steady:
            await happens(lambda: strace.struck() > 0, what="a flush has stalled", timeout_seconds=40)
            await happens(lambda: _held_back(server) > HELD_BACK_BYTES, what="another one stalls")
            victim = server.store_pid()
            kill9(victim)
            await steady.progresses()
        eventually(lambda: server.store_pid() != victim, what="another store", timeout_seconds=30)
        with pytest.raises(AssertionError, match=LOSS):
            await load.verdict(settle_seconds=2.0)


# --- F-11: flushes that fail, disks that are full ---


@pytest.mark.shows("F-11", "C4")
async def test_a_flush_that_fails_ends_the_store_and_a_resend_gives_one_message(
    valkey_binary: str, tmp_path: Path
) -> None:
    fault = f"fdatasync:error=EIO:when={FAILING_FLUSH}"
    strace = Strace(tmp_path, valkey_binary, faults=[fault], once=True)
    with service_on(strace.server, tmp_path) as server:
        assert strace.calls("fdatasync") < FAILING_FLUSH / 2, "it would strike before the load"
        victim = server.store_pid()
        load = build_load(server)
        async with Steady(load) as steady:
            await happens(
                lambda: server.store_pid() != victim, what="the store has ended", timeout_seconds=30
            )
            await steady.progresses()
        assert strace.struck() == 1
        assert "fsync error" in _store_log(server)
        server.until_ready()
        await judge(server, load)


def _store_log(server: DevServer) -> str:
    return (server.folder / "store" / "store.log").read_text(errors="replace")


def _mount(folder: Path, options: str) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False, timeout=10).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if not _mount(folder, f"size={FULL_DISK_BYTES}"):
        pytest.skip("this machine does not let us mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=10)


@pytest.mark.shows("F-11", "C4")
async def test_a_full_disk_ends_the_store_until_there_is_room(small_disk: Path, tmp_path: Path) -> None:
    with DevServer(small_disk, output=tmp_path / "dev.out") as server:
        load = build_load(server)
        async with Steady(load) as steady:
            # Filled from outside: the disk belongs to others too.
            _fill(small_disk / "filler")
            await happens(
                lambda: "is full" in server.output(), what="the launcher says so", timeout_seconds=30
            )
            await steady.is_quiet()
            (small_disk / "filler").unlink()
            await steady.progresses()
        server.until_ready()
        await judge(server, load)


def _fill(path: Path) -> None:
    """Takes every byte that is left; the store may take some of them meanwhile."""
    piece = bytes(65_536)
    with path.open("wb", buffering=0) as filler:
        try:
            while True:
                piece = piece[: filler.write(piece)]
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017 - how far it got is not known before


@pytest.mark.shows("F-11", "C4")
async def test_a_file_that_may_not_grow_ends_the_store_until_it_may(
    valkey_binary: str, tmp_path: Path
) -> None:
    limit = tmp_path / "blocks"
    limit.write_text(str(FULL_FILE_BLOCKS))
    # Without the trap the signal would end the store before it sees the error.
    shell = ["trap '' XFSZ", f"ulimit -f $(cat {limit})"]
    store = write_wrapper(tmp_path / "limited-server", valkey_binary, shell=shell)
    with service_on(store, tmp_path) as server:
        victim = server.store_pid()
        load = build_load(server)
        async with Steady(load) as steady:
            await happens(
                lambda: server.store_pid() != victim, what="the store has ended", timeout_seconds=60
            )
            limit.write_text("unlimited")
            await steady.progresses()
        assert "Can't recover from AOF write error" in _store_log(server)
        server.until_ready()
        await judge(server, load)


# --- F-16 and F-23: slow, not broken ---


@pytest.mark.shows("F-16", "C4")
@pytest.mark.parametrize("command_timeout_ms", [500, 5_000])
async def test_a_store_that_answers_nobody_for_a_while_costs_time_only(
    tmp_path: Path, command_timeout_ms: int
) -> None:
    """With the short limit the outcome of everything in flight is unknown, with the long one it is late."""
    environment = {"QIM__REDIS__COMMAND_TIMEOUT_MS": str(command_timeout_ms)}
    with DevServer(tmp_path, environment=environment) as server:
        load = build_load(server)
        async with Steady(load) as steady:
            for _ in range(2):
                pause_clients(store_socket(server), milliseconds=PAUSE_MS)
                await steady.is_quiet()
                await steady.progresses()
        await judge(server, load)


@pytest.mark.shows("F-16", "C4")
async def test_a_slow_wire_to_the_store_costs_time_only(tmp_path: Path) -> None:
    with proxied_service(tmp_path, workers=2) as service:
        load = build_load(service.server)
        async with Steady(load) as steady:
            for faults in (Faults(latency_ms=50), Faults(bytes_per_second=200_000), Faults(slice_bytes=512)):
                service.to_store.set(faults)
                await steady.progresses(by=100)
        assert service.to_store.counters.delayed_reads > 0
        assert service.to_store.counters.slices > 0
        service.to_store.heal()
        await judge(service.server, load)


@pytest.mark.shows("F-23", "C2")
async def test_flushes_that_stall_cost_time_only(valkey_binary: str, tmp_path: Path) -> None:
    stall = f"fdatasync:delay_enter={STALL_SECONDS * 1e6:.0f}:when=200..600+200"
    strace = Strace(tmp_path, valkey_binary, faults=[stall])
    with service_on(strace.server, tmp_path) as server:
        victim = server.store_pid()
        load = build_load(server)
        async with Steady(load) as steady:
            await happens(lambda: strace.struck() >= 2, what="flushes have stalled", timeout_seconds=40)
            await steady.progresses()
        assert server.store_pid() == victim, "a slow disk is no reason to end"
        await judge(server, load)
