"""Mutants of the commit path: the writer, its recoverer, the scripts of the commit store and of the logs."""

from typing import Final

from tests.mutants.model import Change, Mutant

_ROLE: Final = "tests/unit/workers/test_writer.py::"
_AFTER_A_KILL: Final = "tests/unit/workers/test_recovery.py::"
_RESERVE: Final = "tests/lua/test_reserve_messages.py::"
_MARK: Final = "tests/lua/test_mark_committed.py::"
_COMMITS: Final = "workers/commits.py"
_RECOVERER: Final = "workers/recoverer.py"
_RESERVE_LUA: Final = "lua/reserve_messages.lua"
_MARK_LUA: Final = "lua/mark_committed.lua"
_FINISHED: Final = f"{_AFTER_A_KILL}test_what_was_recorded_at_a_kill_is_finished_without_its_client"

OF_WRITER: Final = (
    Mutant(
        "acknowledged-before-the-outbox",
        "A message is acknowledged when it has its sequence, before its append is durable.",
        ("C2",),
        (f"{_ROLE}test_nothing_is_acknowledged_before_its_append_is_durable",),
        (
            Change(
                _COMMITS,
                "        durable = await self._append(recorded)\n",
                "        for early in recorded:\n            self._settle_requests(early)\n"
                "        durable = await self._append(recorded)\n",
            ),
        ),
    ),
    Mutant(
        "nothing-written-to-the-outbox",
        "Messages are committed and acknowledged beside the log that everybody else follows.",
        ("C1", "C2"),
        (f"{_AFTER_A_KILL}test_all_that_follows_an_acknowledgement_can_be_had_from_the_log_alone",),
        (
            Change(
                _COMMITS,
                "offsets = await self._outbox.append([(home, sending.message) for sending in recorded])",
                "offsets = [Offset(0) for sending in recorded if home >= 0]",
            ),
        ),
    ),
    Mutant(
        "unknown-append-told-as-no",
        "A client is told that nothing was written, while its message may lie in the Outbox.",
        ("C4", "C7"),
        (f"{_ROLE}test_an_unknown_append_is_answered_as_unknown_and_finished_by_the_recoverer",),
        (
            Change(
                _COMMITS,
                "            if offset is None:\n                self._give_up([sending], UNKNOWN)\n",
                "            if offset is None:\n                self._give_up([sending], NOTHING_WRITTEN)\n",
            ),
        ),
    ),
    Mutant(
        "recoverer-off",
        "What a kill or a lost answer left RECORDED is never finished unless its client comes back.",
        ("C7", "C11", "F-02", "F-03"),
        (
            f"{_FINISHED}[writer.reserved]",
            f"{_FINISHED}[writer.appended]",
            f"{_ROLE}test_an_unknown_append_is_answered_as_unknown_and_finished_by_the_recoverer",
        ),
        (
            Change(
                _RECOVERER,
                "adopted = [sending for item in pending if (sending := self._commits.adopt(item))]",
                "adopted = [sending for item in pending[:0] if (sending := self._commits.adopt(item))]",
            ),
        ),
    ),
    Mutant(
        "recovered-without-an-append",
        "The recoverer commits what was RECORDED without having written it to the Outbox.",
        ("C11", "F-02"),
        (f"{_FINISHED}[writer.reserved]",),
        (
            Change(
                _COMMITS,
                "        durable = await self._append(recorded)\n",
                "        for sending in recorded:\n            sending.offset = Offset(0)\n"
                "        old = [sending for sending in recorded if sending.planned is None]\n"
                "        durable = old or await self._append(recorded)\n",
            ),
        ),
    ),
    Mutant(
        "recoverer-takes-what-is-under-way",
        "The recoverer appends a message once more that a pass is still working on.",
        ("C4",),
        (f"{_ROLE}test_the_recoverer_leaves_alone_what_a_pass_still_works_on",),
        (
            Change(
                _COMMITS,
                "if item.key in self.in_flight or item.key in self.stops.unfinishable:",
                "if item.key in self.stops.unfinishable:",
            ),
        ),
    ),
    Mutant(
        "repeat-appended-beside-the-first",
        "A repeat that comes while the first is under way is appended as well.",
        ("C4",),
        (f"{_ROLE}test_a_repeat_that_comes_while_the_first_is_in_flight_waits_for_it",),
        (
            Change(
                _COMMITS,
                "if known is not None and known.identity == planned.identity:",
                "if known is not None and known.identity == planned.record_bytes:",
            ),
        ),
    ),
    Mutant(
        "retry-with-new-bytes",
        "A retry of a RECORDED message goes on with newly built bytes: two contents under one sequence.",
        ("C4",),
        (f"{_AFTER_A_KILL}test_a_retry_goes_on_with_the_bytes_that_were_stored_first",),
        (
            Change(
                _COMMITS,
                "return self._take_stored(sending, result.record)",
                "return self._take_stored(sending, planned.record_bytes)",
            ),
        ),
    ),
    Mutant(
        "outbox-order-assumed",
        "The fan-out leaves out a record whose sequence lies below one that it has seen.",
        ("X6",),
        (f"{_AFTER_A_KILL}test_no_consumer_assumes_that_the_outbox_is_in_the_order_of_sequences",),
        (
            Change(
                "workers/fanout.py",
                "            try:\n                dispatches += plan_dispatches(record.data, snapshots)\n",
                '            seq = int.from_bytes(record.data[8:16], "big")\n'
                '            self.newest = max(seq, getattr(self, "newest", 0))\n'
                "            try:\n"
                "                if seq == self.newest:\n"
                "                    dispatches += plan_dispatches(record.data, snapshots)\n",
            ),
        ),
    ),
    Mutant(
        "body-of-any-size",
        "A body above the limit reaches the store and takes a sequence.",
        ("X16",),
        ("tests/unit/test_writer_rules.py::test_a_send_is_refused_before_it_reaches_a_store",),
        (
            Change(
                "qim/domain/writer.py",
                "    if len(body) > MESSAGE_BODY_BYTES_MAX:\n",
                "    if len(body) > 2 * MESSAGE_BODY_BYTES_MAX:\n",
            ),
        ),
    ),
    Mutant(
        "duplicate-not-recognised",
        "A repeat of a message whose commit is not finished gets a second sequence.",
        ("C4", "X16"),
        (f"{_RESERVE}test_a_repeat_gets_the_coordinates_and_the_stored_bytes_and_writes_nothing",),
        (
            Change(
                _RESERVE_LUA,
                "local value = committed[i] or recorded[i] or values[twin]",
                "local value = committed[i] or values[twin]",
            ),
        ),
    ),
    Mutant(
        "committed-duplicate-not-recognised",
        "A repeat within the two hours gets a second sequence.",
        ("C4",),
        (f"{_RESERVE}test_a_repeat_after_the_commit_gets_the_committed_coordinates",),
        (
            Change(
                _RESERVE_LUA,
                "  if committed[i] then found = found - 1 end\n",
                "  if committed[i] then found = found - 1 end\n"
                "  value, committed[i] = recorded[i] or values[twin], false\n",
            ),
        ),
    ),
    Mutant(
        "identity-not-compared",
        "Other content under a known id is answered with the coordinates of the first.",
        ("C5",),
        (
            f"{_RESERVE}test_other_content_under_a_known_key_is_a_conflict_and_writes_nothing",
            f"{_RESERVE}test_the_same_key_twice_in_a_run_meets_its_earlier_twin",
        ),
        (
            Change(
                _RESERVE_LUA,
                "elseif value and sub(value, 1, 36) ~= sub(head, 4, 39) then",
                "elseif value and not head then",
            ),
        ),
    ),
    Mutant(
        "refused-send-takes-a-sequence",
        "A send that is refused leaves a hole in its conversation.",
        ("C5", "X16"),
        (f"{_RESERVE}test_other_content_under_a_known_key_is_a_conflict_and_writes_nothing",),
        (
            Change(
                _RESERVE_LUA,
                "    answers[i] = -1\n",
                "    answers[i] = -1\n    call('HINCRBY', KEYS[2 + conv], 'n', 1)\n",
            ),
        ),
    ),
    Mutant(
        "clock-skew-unchecked",
        "A worker whose clock is off by hours gives messages times that retention and lists believe.",
        ("X16",),
        (f"{_RESERVE}test_a_worker_clock_that_is_off_is_refused_and_known_messages_are_not",),
        (
            Change(
                _RESERVE_LUA,
                "elseif math.abs(unpack_u64('>I8', head, 40) - now) > skew_ms then",
                "elseif unpack_u64('>I8', head, 40) == 0 then",
            ),
        ),
    ),
    Mutant(
        "reserve-epoch-unchecked",
        "A paused former owner of a slot goes on giving out sequences.",
        ("C7", "X16", "F-05"),
        (f"{_RESERVE}test_a_stale_owner_is_told_item_by_item_and_consumes_no_sequence",),
        (
            Change(
                _RESERVE_LUA,
                "stale[s] = not stale[s] or sub(stale[s], 1, 8) ~= ARGV[5 + slots + s]",
                "stale[s] = not stale[s]",
            ),
        ),
    ),
    Mutant(
        "recorded-without-its-record",
        "A sequence is given out and the message itself is not written with it.",
        ("C3",),
        (f"{_RESERVE}test_everything_of_a_message_is_written_by_one_call_under_one_tag",),
        (Change(_RESERVE_LUA, "  call('HSET', KEYS[hot_at + conv], text, ARGV[record_at + i])\n", ""),),
    ),
    Mutant(
        "written-before-all-is-decided",
        "A run that fails half-way leaves what it had written by then.",
        ("C3", "X16"),
        (f"{_RESERVE}test_a_wrong_type_under_any_key_is_refused_before_any_write",),
        (
            Change(
                _RESERVE_LUA,
                "for i = collect_at + 1, #KEYS do call('ZCARD', KEYS[i]) end\n",
                "",
            ),
        ),
    ),
    Mutant(
        "full-store-takes-new-messages",
        "A store that is full goes on taking new messages until nothing accepted can be finished.",
        ("C3", "X16", "F-12"),
        (f"{_RESERVE}test_a_full_server_refuses_the_run_whole",),
        (Change(_RESERVE_LUA, "#!lua\n", "#!lua flags=allow-oom\n"),),
    ),
    Mutant(
        "pending-expires",
        "A message that stays RECORDED for long is forgotten, and its repeat gets a second sequence.",
        ("C4", "X3"),
        (f"{_RESERVE}test_a_recorded_message_is_known_however_old_it_is",),
        (
            Change(
                _RESERVE_LUA,
                "if #news > 0 then call('HSET', KEYS[2], unpack(fields)) end\n",
                "if #news > 0 then call('HSET', KEYS[2], unpack(fields)) call('EXPIRE', KEYS[2], 7200) end\n",
            ),
        ),
    ),
    Mutant(
        "window-shortened",
        "The idempotency window ends a minute before its two hours.",
        ("C6", "X3"),
        (f"{_MARK}test_a_commit_moves_the_fact_to_a_key_that_expires_two_hours_after_its_stamp",),
        (Change(_MARK_LUA, "text(now + tonumber(ARGV[4]))", "text(now + tonumber(ARGV[4]) - 60000)"),),
    ),
    Mutant(
        "first-stamp-forgotten",
        "A commit that is repeated does not meet its first stamp.",
        ("C6",),
        (f"{_MARK}test_a_repeat_keeps_the_first_stamp_and_changes_nothing",),
        (
            Change(
                _MARK_LUA,
                "local kept = moved[key] or pending[i] ~= value and call('GET', key)",
                "local kept = moved[key]",
            ),
        ),
    ),
    Mutant(
        "mark-epoch-unchecked",
        "A paused former owner of a slot goes on committing.",
        ("C6", "F-05"),
        (f"{_MARK}test_a_stale_owner_is_told_item_by_item_and_moves_nothing",),
        (
            Change(
                _MARK_LUA,
                "stale[s] = not stale[s] or sub(stale[s], 1, 8) ~= ARGV[7 + slots + s]",
                "stale[s] = not stale[s]",
            ),
        ),
    ),
    Mutant(
        "head-over-a-hole",
        "The visible head jumps over a message that is not durable yet.",
        ("X5",),
        (f"{_MARK}test_the_head_waits_for_the_lowest_unfinished_sequence",),
        (Change(_MARK_LUA, "local is_late = seq > heads[conv] + 1", "local is_late = seq < heads[conv]"),),
    ),
    Mutant(
        "recorded-shown-in-history",
        "History shows messages that are not durable yet.",
        ("X5", "F-04"),
        ("tests/lua/test_read_history.py::test_nothing_above_the_visible_head_is_shown",),
        (
            Change(
                "lua/read_history.lua",
                "tonumber(redis.call('HGET', conversation, 'h') or 0)",
                "tonumber(redis.call('HGET', conversation, 'n') or 0)",
            ),
        ),
    ),
    Mutant(
        "read-mark-lowered",
        "A late or repeated MARK_READ makes read messages unread.",
        (),
        ("tests/lua/test_mark_read.py::test_a_mark_rises_never_falls_and_ends_at_the_last_sequence",),
        (Change("lua/mark_read.lua", "    if clamped > mark then\n", "    if clamped ~= mark then\n"),),
    ),
    Mutant(
        "log-begins-anew",
        "A log whose stream was lost hands out its offsets a second time.",
        ("F5",),
        (
            "tests/lua/test_append_log.py::test_a_stream_that_was_made_anew_refuses_its_partition_and_no_other",
        ),
        (
            Change(
                "lua/append_log.lua",
                "if entries == 0 then nexts[s] = nexts[s] and -1 or 0",
                "if entries == 0 then nexts[s] = nexts[s] or 0",
            ),
        ),
    ),
)
