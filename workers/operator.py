"""The operator's commands of one worker: what it is asked and told over its control socket.

    status                                 what it waits for, connections, lag of its loop, what is stopped
    slots                                  epoch and watermark of each slot, and whether it is stopped
    lag                                    records between each consumer and the end of its log
    stores                                 memory of each server, messages ever committed
    mailbox.show|retry|skip|redeliver      the shards that stand still, and the three ways on
    outbox.show|retry|skip                 the same for the Outbox partitions
    membership.add|remove|list             the members of a group (`workers/operator_groups.py`)

Each is a plain function that returns a plain dictionary. A worker that is still starting answers `status` and
refuses the rest. Nothing here decides: the roles do, and raise what the operator is told.
"""

from typing import TYPE_CHECKING, Any

from qim.errors import ControlRefused, ExitCode
from qim.ids import Offset, SlotId
from qim.records import MembershipOp
from workers import operator_groups
from workers.control import Handler
from workers.roles import Roles

if TYPE_CHECKING:
    from workers.worker import Worker

Answer = dict[str, Any]


def worker_commands(worker: "Worker") -> dict[str, Handler]:
    """The commands of this worker."""
    operator = _Operator(worker)
    return {
        "status": operator.status,
        "slots": operator.slots,
        "lag": operator.lag,
        "stores": operator.stores,
        "mailbox.show": operator.show_mailbox,
        "mailbox.retry": operator.retry_mailbox,
        "mailbox.skip": operator.skip_mailbox,
        "mailbox.redeliver": operator.redeliver,
        "outbox.show": operator.show_outbox,
        "outbox.retry": operator.retry_outbox,
        "outbox.skip": operator.skip_outbox,
        "membership.add": operator.add_members,
        "membership.remove": operator.remove_members,
        "membership.list": operator.list_members,
    }


class _Operator:
    def __init__(self, worker: "Worker") -> None:
        self._worker = worker

    def status(self) -> Answer:
        worker = self._worker
        roles = worker.roles
        metrics = worker.metrics
        return {
            "worker": worker.worker,
            "slots": f"{worker.slots[0]}-{worker.slots[-1]}",
            "waiting_for": worker.waiting_for,
            "away": worker.stores_away,
            "connections": metrics.connections,
            "commits": metrics.writer_commits,
            "loop_lag_ms": worker.loop_lag_ms,
            "stopped": self._stopped(roles) if roles is not None else [],
            "not_ready": dict(roles.not_ready) if roles is not None else {},
        }

    def slots(self) -> Answer:
        roles = self._roles()
        claims = self._worker.claims
        epochs = {} if claims is None else {
            slot: epoch for found in claims.epochs.values() for slot, epoch in found.items()
        }  # fmt: skip
        watermarks = roles.mailbox.watermarks
        stopped = {slot: f"mailbox: {at.reason}" for slot, at in roles.mailbox.stopped.items()}
        for slot, at in roles.fanout.stopped.items():
            also = f"{stopped[slot]}; " if slot in stopped else ""
            stopped[slot] = f"{also}fanout: {at.reason}"
        return {
            "slots": [
                {
                    "slot": slot,
                    "worker": self._worker.worker,
                    "epoch": epochs.get(slot),
                    "watermark": watermarks.get(slot),
                    "stopped": slot in stopped,
                    "reason": stopped.get(slot),
                }
                for slot in self._worker.slots
            ]
        }

    async def lag(self) -> Answer:
        roles, stores = self._roles(), self._worker.stores
        rows = []
        for consumer, commit_log, positions in (
            ("fanout", stores.outbox, roles.fanout.positions),
            ("mailbox", stores.dispatch, roles.mailbox.positions),
        ):
            marks = await commit_log.watermarks(self._worker.slots)
            rows += [
                {
                    "slot": slot,
                    "consumer": consumer,
                    "position": positions.get(slot),
                    # The last record, not the place behind it: where position and last agree, nothing waits.
                    "last": mark.high - 1,
                    "lag": mark.behind(positions[slot]) if slot in positions else None,
                }
                for slot, mark in marks.items()
                if mark.high
            ]
        return {"lag": rows}

    async def stores(self) -> Answer:
        stores = self._worker.stores
        rows = [await instance.memory() for instance in stores.instances]
        return {"stores": rows, "messages": await stores.messages()}

    # --- mailbox shards ---

    def show_mailbox(self) -> Answer:
        return {
            "stopped": [
                {"slot": slot, "offset": at.offset, "reason": at.reason}
                for slot, at in self._roles().mailbox.stopped.items()
            ]
        }

    async def retry_mailbox(self, *, slot: int) -> Answer:
        await self._roles().mailbox.retry(SlotId(slot))
        return {"slot": slot, "retried": True}

    async def skip_mailbox(self, *, slot: int, offset: int) -> Answer:
        await self._roles().mailbox.skip(SlotId(slot), Offset(offset))
        return {"slot": slot, "offset": offset, "skipped": True}

    async def redeliver(self, *, slot: int, offset: int) -> Answer:
        recipients = await self._roles().mailbox.redeliver(SlotId(slot), Offset(offset))
        return {"slot": slot, "offset": offset, "recipients": recipients}

    # --- Outbox partitions ---

    def show_outbox(self) -> Answer:
        roles = self._roles()
        rows = [
            {"slot": slot, "offset": at.offset, "reason": at.reason}
            for slot, at in roles.fanout.stopped.items()
        ]
        return {"stopped": rows, "unfinished": dict(roles.writer.stopped)}

    def retry_outbox(self, *, slot: int) -> Answer:
        roles = self._roles()
        resumed = roles.writer.retry(SlotId(slot))
        if SlotId(slot) in roles.fanout.stopped or not resumed:
            roles.fanout.retry(SlotId(slot))
        return {"slot": slot, "retried": True}

    async def skip_outbox(self, *, slot: int, offset: int) -> Answer:
        stored = await self._roles().fanout.skip(SlotId(slot), Offset(offset))
        return {"slot": slot, "offset": offset, "skipped": True, "stored": stored}

    # --- groups ---

    async def add_members(self, *, tenant: int, group: str, users: list[str], request_id: str) -> Answer:
        return await operator_groups.change_members(
            self._roles().writer, MembershipOp.JOIN, tenant=tenant, group=group, users=users,
            request_id=request_id,
        )  # fmt: skip

    async def remove_members(self, *, tenant: int, group: str, users: list[str], request_id: str) -> Answer:
        return await operator_groups.change_members(
            self._roles().writer, MembershipOp.REMOVE, tenant=tenant, group=group, users=users,
            request_id=request_id,
        )  # fmt: skip

    async def list_members(self, *, tenant: int, group: str, after: str = "", limit: int = 0) -> Answer:
        return await operator_groups.list_members(
            self._roles().writer, tenant=tenant, group=group, after=after, limit=limit
        )

    # --- small things ---

    def _roles(self) -> Roles:
        if self._worker.roles is None:
            reason = self._worker.waiting_for or "its start has not finished"
            raise ControlRefused(
                f"worker {self._worker.worker} does not serve yet: {reason}", exit_code=ExitCode.UNREACHABLE
            )
        return self._worker.roles

    @staticmethod
    def _stopped(roles: Roles) -> list[str]:
        return [
            *(f"mailbox shard {slot}: {at.reason}" for slot, at in roles.mailbox.stopped.items()),
            *(f"Outbox partition {slot}: {at.reason}" for slot, at in roles.fanout.stopped.items()),
            *(f"dispatch partition {slot} takes nothing: {why}" for slot, why in roles.fanout.broken.items()),
            *(f"{what}: {reason}" for what, reason in roles.writer.stopped.items()),
        ]
