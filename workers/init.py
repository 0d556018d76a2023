"""`qim init`: gives empty stores their identity, once. Idempotent; needs no server and no other process.

    look     every server is asked first: settings, role, identity, whether it holds data; a refusal anywhere
             stops everything before the first write
    write    identities of mailbox and log, then the logs' own and the mailbox bases; core identities last

So a run that was cut off is simply repeated. A server without our identity that holds data is refused: it
belongs to somebody else, or it is ours and has lost a part. Once a worker has served, an identity that is
missing anywhere is refused too: that server was initialised before and has lost its disk, and a fresh
identity would hide the loss. Foreign stores are exit 65, wrong settings 78, a server that does not answer 69.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from qim.adapters.redis_facts import StoreFacts
from qim.clock import SystemClock
from qim.config import Config, Secret
from qim.domain.guards import ExpectedIdentity, judge_identity
from qim.domain.placement import Placement
from qim.errors import ExitCode, GuardRefused
from qim.ids import MailboxSeq, SlotId
from qim.limits import SLOTS
from qim.metrics import Metrics
from workers.guards import check_settings
from workers.wiring import CORE, Instance, Stores, load_scripts, wire

FIRST_BASE: Final = MailboxSeq(1)
"""mailbox_seq = base + offset, and 0 means none."""


def initialise(config: Config, *, password: Secret) -> list[str]:
    """Does the work; returns what was written, in words, empty when everything was there.

    Raises GuardRefused, StoreRefused (a server is down) or StoreUnfit.
    """
    return asyncio.run(_initialise(config, password))


async def _initialise(config: Config, password: Secret) -> list[str]:
    stores = wire(
        config,
        workers=1,
        scripts=load_scripts(),
        clock=SystemClock(),
        metrics=Metrics(),
        password=password,
    )
    try:
        await stores.connect()
        missing = await _look(stores)
        return await _write(stores, missing) if missing else []
    finally:
        await stores.close()


async def _look(stores: Stores) -> list[tuple[Instance, ExpectedIdentity]]:
    """What has no identity yet; raises GuardRefused for whatever must not be written to."""
    missing = []
    was_served = False
    for instance in stores.instances:
        facts = await instance.facts()
        check_settings(facts, where=instance.where)
        was_served |= facts.was_served
        missing += [
            (instance, identity)
            for identity in instance.expected
            if not _is_present(instance, identity, facts)
        ]
    if missing and was_served:
        _refuse_lost(missing)
    return missing


def _is_present(instance: Instance, identity: ExpectedIdentity, facts: StoreFacts) -> bool:
    found = facts.identities.get(identity.field)
    if found is None:
        if not facts.identities and facts.keys:
            raise GuardRefused(
                f"{instance.where}: holds {facts.keys} keys and no identity of qim; give qim a server of its"
                " own, or empty this one if its data are not needed",
                exit_code=ExitCode.FOREIGN_STORE,
            )
        return False
    refusal = judge_identity(identity, found)
    if refusal is not None:
        raise GuardRefused(f"{instance.where}: {refusal}", exit_code=refusal.exit_code)
    return True


def _refuse_lost(missing: Sequence[tuple[Instance, ExpectedIdentity]]) -> None:
    instance, identity = missing[0]
    raise GuardRefused(
        f"{instance.where}: has no identity as {identity.role} {identity.number}, but this deployment has"
        " served before: the server has lost its data, or is a new place; restore it from its own disk",
        exit_code=ExitCode.FOREIGN_STORE,
    )


async def _write(stores: Stores, missing: Sequence[tuple[Instance, ExpectedIdentity]]) -> list[str]:
    cores = [each for each in missing if each[1].role == CORE]
    others = [each for each in missing if each[1].role != CORE]
    await _write_identities(others)
    log_identity = await stores.create_logs()
    placement = Placement(1, len(stores.commits), len(stores.mailboxes))
    for number, mailbox in enumerate(stores.mailboxes):
        mine = [slot for slot in map(SlotId, range(SLOTS)) if placement.mailbox_instance_of(slot) == number]
        await mailbox.initialise_shards(dict.fromkeys(mine, FIRST_BASE), log_identity)
    await _write_identities(cores)
    return [
        f"{instance.where}: {identity.role} {identity.number} of {identity.instances}"
        for instance, identity in missing
    ]


async def _write_identities(missing: Sequence[tuple[Instance, ExpectedIdentity]]) -> None:
    for instance, identity in missing:
        await instance.identify(identity)
