"""A program that uses the SDK until it is killed: `python -m tests.rows.sdk_process SPEC.json`.

It sends numbered messages to one peer and notes, one line each and at once: every message that became
durable here (`queued`) and every message that the application was told of (`told`). A spec may name a step at
which the process ends without a word, as after kill -9; the lines say what an application had seen by then.

    before_pending   ordinals are reserved, the row is not written
    before_frame     the row is durable, nothing has left
    before_ack       the acknowledgement has come, nothing of it is stored
    inside_page      a page and its cursor are written, not committed
    before_tell      a transaction is committed, the application does not know
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from qim.client import AsyncClient, MessagesAdded
from qim.client.errors import SdkError
from qim.client.steps import Applied, Incoming, StoreSteps
from qim.client.store import Store
from qim.client.work import Work

KILLED: Final = 137
AT_ONCE: Final = 4


class Strike:
    """Ends the process when the step is reached for the n-th time."""

    def __init__(self, hit: int, struck: Path) -> None:
        self._left, self._struck = hit, struck

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._struck.touch()
            os._exit(KILLED)


def arm(step: str, strike: Strike) -> None:
    """Puts the strike where the step is."""
    match step:
        case "before_pending":
            _before(StoreSteps, "insert_pending", strike)
        case "before_frame":
            _before(Work, "_on_queued", strike)
        case "before_ack":
            _before(Store, "apply", strike, lambda incoming: bool(incoming.acks))
        case "inside_page":
            _after_page(strike)
        case "before_tell":
            _before(Work, "tell", strike, lambda applied: bool(applied.added))
        case _:
            raise ValueError(step)


def _before(owner: Any, name: str, strike: Strike, applies: Callable[[Any], bool] = lambda _: True) -> None:
    original = getattr(owner, name)

    def method(self: object, argument: Any) -> Any:
        if applies(argument):
            strike()
        return original(self, argument)

    setattr(owner, name, method)


def _after_page(strike: Strike) -> None:
    original = StoreSteps.apply

    def apply(steps: StoreSteps, incoming: Incoming) -> Applied:
        applied = original(steps, incoming)
        if incoming.cursor is not None:
            strike()
        return applied

    setattr(StoreSteps, "apply", apply)  # noqa: B010 - the class is changed on purpose


async def main(spec: dict[str, Any]) -> None:
    folder = Path(spec["folder"])
    queued, told = (
        os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in ("queued", "told")
    )
    if spec["step"]:
        arm(spec["step"], Strike(spec["hit"], folder / "struck"))
    async with AsyncClient(
        spec["endpoint"], spec["token"], ca=spec["ca"], data_dir=folder / "data"
    ) as client:
        listening = asyncio.create_task(listen(client, told))
        try:
            await talk(client, bytes.fromhex(spec["peer"]), spec["run"], queued)
        finally:
            listening.cancel()


async def talk(client: AsyncClient, peer: bytes, run: str, queued: int) -> None:
    number = 0
    while True:
        sends = []
        for _ in range(AT_ONCE):
            text = f"{run}.{number}"
            cmid = await client.queue(peer, text)
            os.write(queued, f"{cmid.hex()} {text}\n".encode())
            sends.append(cmid)
            number += 1
        # As many as an application would have under way: the next ones follow when these are settled.
        waiters = [client._running.work.acknowledgement(cmid) for cmid in sends]
        await asyncio.wait(waiters, timeout=0.2)


async def listen(client: AsyncClient, told: int) -> None:
    try:
        async for event in client.events():
            if isinstance(event, MessagesAdded):
                for message in event.messages:
                    os.write(told, f"{message.conversation_seq} {message.text}\n".encode())
    except SdkError:
        return


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
