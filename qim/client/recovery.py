"""What takes several requests: a rebuild, and the search for an old message whose answer never came.

Both ask the server through a function of their owner and decide with `sync.py`; neither touches the socket.
When the connection ends, `ask` raises Disconnected, the work ends, and the next login begins it anew: nothing
was changed before its one transaction.

Rebuild. The cursor is older than the mailbox keeps, or above what the server has. The batch carried
covered_through = W, read before anything else, so whatever comes later lies above W and is read after the
rebuild. The whole SESSION_LIST is read, then one transaction sets cursor = W and notes a gap for every
stretch up to head_seq that is not here; a push may have brought the newest message already. A server without
SESSION_LIST answers UNSUPPORTED: then the heads of the conversations that this store knows are asked one by
one. A conversation that is not known here and has nothing in the mailbox any more stays invisible until its
next message; only the list could tell it. Then a gap is noted for all that lies before that message, so
nothing of it stays missing.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from msgspec import Raw, Struct

from qim.client.errors import MessageRejected, RateLimited, Timeout
from qim.client.model import Conversation, Target
from qim.client.outgoing import PendingRow
from qim.client.steps import RebuildItem
from qim.client.sync import SeenPage, Verdict, judge_page
from qim.errors import PermissionDenied, RemoteProtocolError, Unsupported
from qim.ids import Millis, Seq, TenantId, UserId
from qim.limits import PAGE_ENTRIES_MAX
from qim.records import Entry, Kind, identity_digest, message_id_of
from qim.wire import bodies
from qim.wire.bodies import HistoryBatch, PullHistory, SessionList, SessionListReq, decode_pushed
from qim.wire.layout import Op

Ask = Callable[[int, Struct], Awaitable[Any]]
SESSION_PAGE: Final = 200
RETRY_SECONDS: Final = 1.0
SESSION_PAGES_MAX: Final = 5_000
"""A million conversations; a server that never ends its list is cut off here."""


async def patiently(ask: Ask, op: int, body: Struct) -> Any:  # noqa: ANN401 - the reply's body, by opcode
    """Repeats until the answer is an answer. Raises Disconnected, MessageRejected and AuthError."""
    while True:
        try:
            return await ask(op, body)
        except RateLimited as error:
            await asyncio.sleep(max(error.retry_after, RETRY_SECONDS))
        except Timeout:
            await asyncio.sleep(RETRY_SECONDS)


def wire_target(target: Target) -> bodies.Target:
    return bodies.Target(target.kind, target.id)


async def list_for_rebuild(ask: Ask, known: list[Conversation]) -> list[RebuildItem]:
    """Every conversation of the user, or the known ones where the server has no list."""
    try:
        return await _list_sessions(ask)
    except MessageRejected as error:
        if error.code != Unsupported.code:
            raise
    heads = [await _head_of(ask, conversation) for conversation in known]
    return [head for head in heads if head is not None]


async def _list_sessions(ask: Ask) -> list[RebuildItem]:
    items: list[RebuildItem] = []
    cursor = b""
    for _ in range(SESSION_PAGES_MAX):
        page: SessionList = await patiently(ask, Op.SESSION_LIST_REQ, SessionListReq(cursor, SESSION_PAGE))
        items.extend(
            RebuildItem(
                item.conversation_id, Target(item.target.kind, item.target.id), item.head_seq, item.read_seq,
                item.last_activity,
            )
            for item in page.items
        )  # fmt: skip
        cursor = page.next_cursor
        if not cursor:
            break
    return items


async def _head_of(ask: Ask, known: Conversation) -> RebuildItem | None:
    try:
        page: HistoryBatch = await patiently(
            ask, Op.PULL_HISTORY, PullHistory(wire_target(known.target), limit=1)
        )
    except MessageRejected:
        # Not visible any more: what is stored stays, and there is nothing to fetch.
        return None
    return RebuildItem(page.conversation_id, known.target, page.head_seq, known.read_seq, known.last_activity)


async def search_history(
    ask: Ask, row: PendingRow, *, tenant: TenantId, me: UserId, server_now: Millis
) -> tuple[Verdict, tuple[HistoryBatch, Entry] | None]:
    """Whether an old message is in its conversation, back to its own time; with its entry if it is."""
    before = Seq(0)
    while True:
        request = PullHistory(wire_target(row.target), before_seq=before, limit=PAGE_ENTRIES_MAX)
        try:
            page: HistoryBatch = await patiently(ask, Op.PULL_HISTORY, request)
        except MessageRejected as error:
            # A direct conversation that does not exist holds no message; a group may merely be closed to us.
            is_absent = error.code == PermissionDenied.code and row.target.kind == Kind.DIRECT
            return (Verdict.ABSENT if is_absent else Verdict.UNKNOWN), None
        entries = [decode_entry(raw) for raw in page.records]
        found = _find(entries, row, me)
        if found is not None:
            verdict = Verdict.FOUND if _is_same(found, page, row, tenant, me) else Verdict.OTHER_CONTENT
            return verdict, (page, found)
        seen = SeenPage(
            is_found=False, oldest_reserved_at=entries[-1].record.reserved_at if entries else Millis(0),
            earliest_available_seq=page.earliest_available_seq, head_seq=page.head_seq, more=page.more,
        )  # fmt: skip
        verdict = judge_page(
            seen, first_sent_at=row.first_sent_at, retention_class=row.retention_class, server_now=server_now
        )
        if verdict is not Verdict.READ_ON or not entries:
            return (Verdict.UNKNOWN if verdict is Verdict.READ_ON else verdict), None
        before = entries[-1].conversation_seq


def decode_entry(raw: Raw) -> Entry:
    """An entry of a page, where an echo has no place."""
    entry = decode_pushed(raw)
    if not isinstance(entry, Entry):
        raise RemoteProtocolError("an echo inside a page")
    return entry


def _find(entries: list[Entry], row: PendingRow, me: UserId) -> Entry | None:
    for entry in entries:
        if entry.record.client_message_id == row.client_message_id and entry.record.sender == me:
            return entry
    return None


def _is_same(entry: Entry, page: HistoryBatch, row: PendingRow, tenant: TenantId, me: UserId) -> bool:
    expected = identity_digest(
        tenant=tenant, conversation=page.conversation_id, sender=me, client_message_id=row.client_message_id,
        message_type=row.message_type, retention_class=row.retention_class, custom_type=row.custom_type,
        body=row.body,
    )  # fmt: skip
    return bool(entry.record.message_id == message_id_of(expected))
