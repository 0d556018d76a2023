"""Power loss at random instants: `always` loses nothing that was acknowledged, everything weaker does.

A client writes numbered keys and notes the instant of every acknowledgement. Images of many instants are then
started, and each must hold every key acknowledged until then. The settings that qim refuses are the twins:
the same instants, and keys are missing.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import redis

from tests.faults.power_loss import DiskWatch, Instant
from tests.faults.strace import Strace
from tests.services import StoreServer
from tests.waiting import eventually

INSTANTS: Final = 20
WRITES: Final = 200
REWRITE_KEYS: Final = 300
SAVE_DELAY_MICROSECONDS: Final = 500
"""Per key, so that a rewrite lasts long enough for writes to happen meanwhile."""


class Written(NamedTuple):
    key: bytes
    at: Instant


class Writer:
    """Numbered keys, each acknowledged at a known instant."""

    def __init__(self, server: StoreServer, watch: DiskWatch) -> None:
        self.store = redis.Redis(unix_socket_path=str(server.socket_path))
        self.watch = watch
        self.written: list[Written] = []

    def write(self, count: int) -> None:
        for _ in range(count):
            key = b"%08d" % len(self.written)
            self.store.set(key, b"value")
            self.written.append(Written(key, self.watch.now()))

    def rewrite(self) -> int:
        """Writes while the file is rewritten; how many were acknowledged meanwhile."""
        self.store.config_set("rdb-key-save-delay", SAVE_DELAY_MICROSECONDS)
        self.store.bgrewriteaof()
        before = len(self.written)
        eventually(self._has_finished_rewriting, what="the rewrite ends")
        return len(self.written) - before

    def _has_finished_rewriting(self) -> bool:
        self.write(1)
        return not self.store.info("persistence")["aof_rewrite_in_progress"]


@contextmanager
def watched(binary: str, folder: Path, settings: Mapping[str, str]) -> Iterator[Writer]:
    watch = DiskWatch(folder / "watch", binary)
    server = StoreServer(str(watch.server), folder / "store", settings=settings)
    try:
        server.start()
        writer = Writer(server, watch)
        with writer.store:
            yield writer
    finally:
        server.close()


def keys_in_image(binary: str, image: Path) -> set[bytes]:
    server = StoreServer(binary, image)
    try:
        server.start()
        with redis.Redis(unix_socket_path=str(server.socket_path)) as store:
            return set(store.keys())
    finally:
        server.close()


def lost(
    binary: str, writer: Writer, folder: Path, instants: Iterable[Instant], *, renamed: bool = False
) -> int:
    """Acknowledged keys that are missing, summed over the images of the instants."""
    missing = 0
    for number, instant in enumerate(instants):
        image = folder / f"image-{renamed}-{number}"
        writer.watch.write_image(instant, image, renamed=renamed)
        acknowledged = {key for key, at in writer.written if at <= instant}
        missing += len(acknowledged - keys_in_image(binary, image))
    return missing


def random_instants(writer: Writer) -> list[Instant]:
    return sorted(random.Random(1).choices([at for _, at in writer.written], k=INSTANTS))


def instants_of_rewrite(writer: Writer) -> list[Instant]:
    """The notes at which names or files of the rewrite changed; flushes of single keys are left out."""
    found = [(at, state) for at, state in writer.watch.instants() if state.is_rewriting]
    steps = [
        at
        for (at, state), (_, before) in zip(found[1:], found, strict=False)
        if (state.names, state.newest_names, len(state.lengths))
        != (before.names, before.newest_names, len(before.lengths))
    ]
    return [found[0][0], *steps]


@pytest.mark.shows("F-10", "C10")
def test_always_loses_nothing_at_twenty_random_instants(valkey_binary: str, tmp_path: Path) -> None:
    with watched(valkey_binary, tmp_path, {}) as writer:
        writer.write(WRITES)
    instants = random_instants(writer)
    assert len(set(instants)) > INSTANTS / 2
    assert lost(valkey_binary, writer, tmp_path, instants) == 0


@pytest.mark.shows("F-10", "C10")
def test_everysec_loses_what_it_acknowledged(valkey_binary: str, tmp_path: Path) -> None:
    with watched(valkey_binary, tmp_path, {"appendfsync": "everysec"}) as writer:
        writer.write(WRITES)
    assert lost(valkey_binary, writer, tmp_path, random_instants(writer)[:3]) > 0


@pytest.mark.shows("F-10", "C10")
def test_always_loses_nothing_at_any_step_of_a_rewrite(valkey_binary: str, tmp_path: Path) -> None:
    """Whether or not a rename reached the disk before its folder was flushed."""
    with watched(valkey_binary, tmp_path, {}) as writer:
        writer.write(REWRITE_KEYS)
        assert writer.rewrite() > 10, "nothing was written meanwhile"
    instants = instants_of_rewrite(writer)
    assert len(instants) >= 5, "the rewrite was not seen"
    assert lost(valkey_binary, writer, tmp_path, instants) == 0
    differing = [at for at in instants if names_differ(writer, at)]
    assert differing, "no instant lies between a rename and the flush of its folder"
    assert lost(valkey_binary, writer, tmp_path, differing, renamed=True) == 0


def names_differ(writer: Writer, at: Instant) -> bool:
    state = writer.watch.state_at(at)
    return state.names != state.newest_names


@pytest.mark.shows("F-10", "C10")
def test_a_rewrite_without_flushes_loses_what_was_acknowledged_meanwhile(
    valkey_binary: str, tmp_path: Path
) -> None:
    with watched(valkey_binary, tmp_path, {"no-appendfsync-on-rewrite": "yes"}) as writer:
        writer.write(REWRITE_KEYS)
        meanwhile = writer.rewrite()
    assert meanwhile > 10
    during = [at for _, at in writer.written[-meanwhile // 2 :]]
    assert lost(valkey_binary, writer, tmp_path, during[:1]) > 0


def test_an_image_holds_the_durable_begin_of_each_file(valkey_binary: str, tmp_path: Path) -> None:
    with watched(valkey_binary, tmp_path, {}) as writer:
        writer.write(10)
        middle = writer.written[4].at
        writer.write(10)
    writer.watch.write_image(middle, tmp_path / "image")
    (whole,) = (tmp_path / "store" / "appendonlydir").glob("*.incr.aof")
    (cut,) = (tmp_path / "image" / "appendonlydir").glob("*.incr.aof")
    assert whole.read_bytes().startswith(cut.read_bytes())
    assert cut.read_bytes().count(b"value") == 5
    assert whole.read_bytes().count(b"value") == 20


def test_every_flush_that_the_kernel_saw_is_in_the_notes(valkey_binary: str, tmp_path: Path) -> None:
    """strace as the second opinion: a flush that the notes miss would make images look worse than they are,
    one that they invent would make them look better.
    """
    watch = DiskWatch(tmp_path / "watch", valkey_binary)
    strace = Strace(tmp_path, str(watch.server), faults=[])
    server = StoreServer(str(strace.server), tmp_path / "store")
    try:
        server.start()
        writer = Writer(server, watch)
        with writer.store:
            writer.write(20)
            writer.rewrite()
    finally:
        server.close()
    notes = (tmp_path / "watch" / "log").read_text().splitlines()
    noted = sum(line.startswith(("file ", "durable ")) for line in notes)
    seen = strace.calls("fdatasync") + strace.calls("fsync")
    assert noted == seen > 30
