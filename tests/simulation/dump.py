"""The final reads of a world's stores, and the samples on the way, in the format of the history checker."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from qim.domain.mailbox import read_dispatch
from qim.ids import Offset
from qim.records import decode_entry, message_id_of, outbox_entry, parse_dispatch_record
from tests.checker import history
from tests.checker.history import Event, Shown, StoreRead
from tests.simulation.device import read_database
from tests.simulation.schedule import TENANT

if TYPE_CHECKING:
    from tests.simulation.world import World


def sample(world: "World") -> history.Sample:
    """W of every shard and the end of every Outbox partition that has one."""
    marks = [
        (int(slot), int(shard.watermark))
        for state in world.servers.mailboxes
        for slot, shard in state.shards.items()
        if shard.watermark and world.setting.placement.mailbox_instance_of(slot) == _number(world, state)
    ]
    outbox = world.servers.outbox
    ends = sorted((int(slot), int(part.high)) for slot, part in outbox._partitions.items() if part.high)
    return history.Sample(world.book.t, "world", marks, ends)


def _number(world: "World", state: object) -> int:
    return next(at for at, one in enumerate(world.servers.mailboxes) if one is state)


def dump(world: "World") -> Iterator[Event | StoreRead]:
    """Devices first, then every store from its beginning."""
    yield from _devices(world)
    yield from _outbox(world)
    yield from _dispatch(world)
    yield from _facts(world)
    yield from _mailboxes(world)


def _devices(world: "World") -> Iterator[Event]:
    for device in world.devices:
        placed = device.placed
        stored = read_database(device.database, TENANT, placed.user)
        if stored.unsent:
            world.mistakes.append(f"device {placed.number} keeps {stored.unsent} unsent messages")
        if stored.doubled:
            world.mistakes.append(f"device {placed.number} holds {stored.doubled} messages twice")
        name = f"device-{placed.number}.{device.boots}"
        yield history.Device(
            world.book.t, name, placed.user.hex(), placed.device.hex(), stored.cursor, stored.held
        )


def _outbox(world: "World") -> Iterator[StoreRead]:
    digest = world.book.digest
    for slot, part in sorted(world.servers.outbox._partitions.items()):
        for offset, data in enumerate(part.records, part.low):
            raw = outbox_entry(data)
            entry = decode_entry(raw)
            record = entry.record
            yield history.Outbox(
                slot, offset, record.conversation_id.hex(), entry.conversation_seq,
                (record.parties[:16].hex(), record.parties[16:].hex()), record.sender.hex(),
                record.client_message_id.hex(), record.message_id.hex(), digest(record.body), digest(raw),
                record.reserved_at, round(world.servers.outbox.durable_at[slot, Offset(offset)] * 1e9),
            )  # fmt: skip


def _dispatch(world: "World") -> Iterator[StoreRead]:
    for slot, part in sorted(world.servers.dispatch._partitions.items()):
        for offset, data in enumerate(part.records, part.low):
            read = read_dispatch(data, slot)
            dispatch = parse_dispatch_record(data)
            entry = decode_entry(dispatch.entry)
            yield history.Dispatch(
                slot, offset, read.dispatch_id.hex(), entry.record.conversation_id.hex(),
                entry.conversation_seq, tuple(user.hex() for user in dispatch.recipients),
                world.book.digest(dispatch.entry),
            )  # fmt: skip


def _facts(world: "World") -> Iterator[StoreRead]:
    for state in world.servers.commits:
        for word, facts in (("pending", state.pending), ("committed", state.committed)):
            for key, fact in facts.items():
                yield history.Fact(
                    "pending" if word == "pending" else "committed", key.conversation.hex(), key.sender.hex(),
                    key.client_message_id.hex(), message_id_of(fact.identity).hex(), fact.seq,
                )  # fmt: skip


def _mailboxes(world: "World") -> Iterator[StoreRead]:
    placement = world.setting.placement
    for number, state in enumerate(world.servers.mailboxes):
        for slot, shard in sorted(state.shards.items()):
            if placement.mailbox_instance_of(slot) == number:
                yield history.Shard(slot, shard.base, shard.watermark)
        by_user: dict[bytes, list[Shown]] = {}
        for name, box in state.boxes.items():
            shown = by_user.setdefault(name.user, [])
            for raw, mailbox_seq in box.items():
                entry = decode_entry(raw)
                shown.append(
                    Shown(
                        mailbox_seq, entry.record.conversation_id.hex(), entry.conversation_seq,
                        world.book.digest(raw),
                    )
                )  # fmt: skip
        for user, entries in sorted(by_user.items()):
            yield history.Mailbox(user.hex(), sorted(entries))
        for noted in state.progress.values():
            for dispatch_id, progress in noted.items():
                yield history.Progress(dispatch_id.hex(), progress.state)  # type: ignore[arg-type]  # one of the three
