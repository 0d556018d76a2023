"""Mutants of the SDK: what it stores before it speaks, what moves its cursor, who it says it is."""

from typing import Final

from tests.mutants.model import Change, Mutant

_CLIENT: Final = "tests/unit/client/test_client.py::"
_STORE: Final = "tests/unit/client/test_store.py::"
_SYNC: Final = "tests/unit/client/test_sync.py::"
_ACCOUNT: Final = "tests/unit/client/test_account.py::"

OF_CLIENT: Final = (
    Mutant(
        "frame-before-the-row",
        "A message leaves before it is durable: a crash forgets it, and a full disk is not reported.",
        ("K1",),
        (f"{_CLIENT}test_a_send_that_cannot_be_made_durable_is_reported_and_never_sent",),
        (
            Change(
                "qim/client/store.py",
                "            steps.insert_pending(row)\n            return row\n",
                "            with suppress(sqlite3.Error):\n                steps.insert_pending(row)\n"
                "            return row\n",
            ),
        ),
    ),
    Mutant(
        "results-before-the-commit",
        "A step is reported as done before its transaction is committed.",
        ("K1",),
        ("tests/unit/client/test_store_order.py::test_a_result_is_told_only_after_its_commit",),
        (
            Change(
                "qim/client/store.py",
                "                    step.result = step.run(steps)\n"
                '                connection.execute("COMMIT")\n',
                "                    step.result = step.run(steps)\n"
                "                self._tell(_report, list(batch))\n"
                '                connection.execute("COMMIT")\n',
            ),
        ),
    ),
    Mutant(
        "resend-before-the-mailbox",
        "After a reconnect messages are sent again before the mailbox could say that they arrived.",
        ("K1",),
        (
            f"{_SYNC}test_rows_go_out_in_order_and_only_after_the_mailbox_was_drained",
            f"{_CLIENT}test_a_resend_after_a_reconnect_waits_for_the_mailbox",
        ),
        (
            Change(
                "qim/client/outgoing.py",
                "        if not is_drained or now < self._hold_until or not self._waiting:\n",
                "        if now < self._hold_until or not self._waiting:\n",
            ),
        ),
    ),
    Mutant(
        "rows-lost-with-the-connection",
        "What was in flight when a connection ended is never sent again.",
        ("K1",),
        (f"{_SYNC}test_a_lost_connection_brings_every_row_back_under_its_identity",),
        (
            Change(
                "qim/client/outgoing.py",
                "        for row, _ in self._in_flight.values():\n"
                "            self._waiting[row.ordinal] = row\n",
                "",
            ),
        ),
    ),
    Mutant(
        "resend-under-a-new-identity",
        "A message without an answer goes out again as another message, so it may arrive twice.",
        ("K1",),
        (f"{_SYNC}test_a_lost_connection_brings_every_row_back_under_its_identity",),
        (
            Change(
                "qim/client/outgoing.py",
                "        for row, _ in self._in_flight.values():\n"
                "            self._waiting[row.ordinal] = row\n",
                "        for row, _ in self._in_flight.values():\n"
                "            renamed = ClientMessageId(row.client_message_id[::-1])\n"
                "            self._waiting[row.ordinal] = row._replace(client_message_id=renamed)\n",
            ),
        ),
    ),
    Mutant(
        "page-and-cursor-in-two-transactions",
        "The cursor is written in a transaction of its own behind the messages of its page.",
        ("K2", "F-37"),
        (f"{_STORE}test_messages_and_cursor_are_one_transaction",),
        (
            Change(
                "qim/client/steps.py",
                "        if incoming.cursor is not None:\n",
                "        if incoming.cursor is not None:\n"
                '            self._connection.execute("COMMIT")\n'
                '            self._connection.execute("BEGIN IMMEDIATE")\n',
            ),
        ),
    ),
    Mutant(
        "cursor-from-a-push",
        "The stored cursor follows a push: what was lost before it is never pulled.",
        ("K3",),
        (f"{_CLIENT}test_held_pushes_move_the_cursor_by_a_pull_that_fetches_nothing",),
        (
            Change(
                "qim/client/received.py",
                "        into.pushes.append((Pushed(previous, mailbox_seq), echo))\n",
                "        into.pushes.append((Pushed(previous, mailbox_seq), echo))\n"
                "        into.incoming.cursor = mailbox_seq\n",
            ),
        ),
    ),
    Mutant(
        "chain-moves-the-cursor",
        "The pull after a push names the push as its cursor.",
        ("K3",),
        (f"{_SYNC}test_pushes_never_move_the_cursor",),
        (
            Change(
                "qim/client/sync.py",
                "        self._seqs.append(mailbox_seq)\n        self._end = mailbox_seq\n",
                "        self._seqs.append(mailbox_seq)\n        self._end = self.cursor = mailbox_seq\n",
            ),
        ),
    ),
    Mutant(
        "remembered-before-the-commit",
        "A message counts as known before it is stored: after a failed commit it is dropped as a duplicate.",
        ("K4",),
        (f"{_CLIENT}test_nothing_is_remembered_or_told_when_the_commit_fails",),
        (
            Change(
                "qim/client/work.py",
                "            applied = await self._store.apply(got.incoming)\n",
                "            for message in got.incoming.messages:\n"
                "                self._remember((message.conversation_id, message.conversation_seq))\n"
                "            applied = await self._store.apply(got.incoming)\n",
            ),
        ),
    ),
    Mutant(
        "released-before-the-commit",
        "An outgoing row is released by the acknowledgement itself, before that was stored.",
        ("K4",),
        (f"{_CLIENT}test_nothing_is_remembered_or_told_when_the_commit_fails",),
        (
            Change(
                "qim/client/work.py",
                "            applied = await self._store.apply(got.incoming)\n",
                "            for early in got.incoming.acks:\n                self._settle(_ack_of(early))\n"
                "            applied = await self._store.apply(got.incoming)\n",
            ),
        ),
    ),
    Mutant(
        "pending-kept-after-the-acknowledgement",
        "An acknowledged message stays in the list of those to be sent.",
        ("K4",),
        (f"{_STORE}test_pending_is_released_by_the_acknowledgement_and_by_the_own_message",),
        (
            Change(
                "qim/client/steps.py",
                "        self._release(message, applied, is_duplicate=ack.duplicate)\n"
                "        self._store([message], applied)\n",
                "        applied.added.append(message)\n",
            ),
        ),
    ),
    Mutant(
        "messages-before-conversations",
        "An application is told of messages of a conversation that it was not told of.",
        ("K5",),
        (f"{_CLIENT}test_conversations_are_updated_before_their_messages_are_added",),
        (
            Change(
                "qim/client/work.py",
                "        if applied.conversations:\n"
                "            self._events.emit(ConversationsUpdated(tuple(applied.conversations)))\n"
                "        if applied.added:\n"
                "            self._events.emit(MessagesAdded(tuple(applied.added)))\n",
                "        if applied.added:\n"
                "            self._events.emit(MessagesAdded(tuple(applied.added)))\n"
                "        if applied.conversations:\n"
                "            self._events.emit(ConversationsUpdated(tuple(applied.conversations)))\n",
            ),
        ),
    ),
    Mutant(
        "ordinals-reused",
        "A block of ordinals is used without having been reserved: another process gets the same.",
        ("K6", "F-37"),
        (
            f"{_STORE}test_ordinals_are_reserved_before_use_and_never_again_after_a_rollback",
            f"{_STORE}test_two_handles_on_one_file_never_share_an_ordinal_and_never_see_a_lock",
        ),
        (Change("qim/client/steps.py", '        self._set_meta("ordinal", first + count)\n', ""),),
    ),
    Mutant(
        "identity-without-the-device",
        "Two devices of a user give their messages the same identities.",
        ("K6",),
        (f"{_ACCOUNT}test_an_identity_depends_on_the_device_and_the_ordinal",),
        (Change("qim/client/account.py", "blake3(_CMID_DOMAIN + device_id + ", "blake3(_CMID_DOMAIN + "),),
    ),
    Mutant(
        "copy-releases-foreign-rows",
        "A message of another copy of the store releases a row of other content: it is lost silently.",
        ("K6",),
        (f"{_STORE}test_an_own_message_of_other_content_does_not_release_the_row_of_a_copy",),
        (
            Change(
                "qim/client/steps.py",
                '            " AND custom_type = ? AND body = ? AND',
                "            \" AND custom_type = ? AND body != x'' || ? AND",
            ),
        ),
    ),
    Mutant(
        "copy-keeps-its-identity",
        "A copied store goes on under the device and the ordinals that another copy has used.",
        ("K6", "F-38"),
        (f"{_CLIENT}test_a_copied_store_gets_a_conflict_that_is_shown_and_never_renumbered",),
        (
            Change(
                "qim/client/work.py",
                "        if body.code == Conflict.code:\n            # Another copy",
                "        if body.code < 0:\n            # Another copy",
            ),
        ),
    ),
    Mutant(
        "token-in-the-path",
        "The path of the store carries a piece of the token.",
        ("K7",),
        (f"{_ACCOUNT}test_the_path_is_scope_tenant_and_user_and_nothing_of_the_token",),
        (
            Change(
                "qim/client/account.py",
                "        return Account(TenantId(claims.tenant), user, device)\n",
                '        return Account(f"{claims.tenant}-{parts[2]}", user, device)\n',
            ),
        ),
    ),
    Mutant(
        "one-file-for-all-ports",
        "Two servers on one host share a local store.",
        ("K7",),
        (f"{_ACCOUNT}test_another_server_tenant_or_user_is_another_file",),
        (
            Change(
                "qim/client/account.py",
                "blake3(_SCOPE_DOMAIN + endpoint.canonical().encode())",
                "blake3(_SCOPE_DOMAIN + endpoint.host.encode())",
            ),
        ),
    ),
    Mutant(
        "one-server-in-two-files",
        "A server written in capitals is another server, with an empty mailbox and a second set of ordinals.",
        ("K7",),
        (f"{_ACCOUNT}test_one_server_written_in_several_ways_is_one_scope",),
        (
            Change(
                "qim/client/account.py",
                "        return host.lower().removesuffix",
                "        return host.removesuffix",
            ),
        ),
    ),
)
