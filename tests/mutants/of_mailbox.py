"""Mutants of the mailbox: its scripts, its role, its pages.

Runs and scripts that forget a check, a W that moves without its work, a shard that stops the others.
"""

from typing import Final

from tests.mutants.model import Change, Mutant

_RUNS: Final = "tests/lua/test_materialise_dispatches.py::"
_ROLE: Final = "tests/unit/workers/test_mailbox.py::"
_PAUSES: Final = "tests/unit/workers/test_pauses.py::"
_TOLD: Final = "tests/unit/workers/test_shards.py::"
_FUSED: Final = "lua/materialise_dispatches.lua"

OF_MAILBOX: Final = (
    Mutant(
        "stopped-shard-goes-on",
        "A shard that stops while its back-off is waited for goes on by itself.",
        ("X9",),
        (f"{_PAUSES}test_a_shard_that_stops_during_its_back_off_does_not_go_on_by_itself",),
        (
            Change(
                "workers/pauses.py",
                "        self._waiting.discard(shard.slot)\n        self._pause",
                "        self._pause",
            ),
        ),
    ),
    Mutant(
        "w-over-a-gap",
        "A fused run is written although it does not follow W: what lies between is lost.",
        ("M4",),
        (f"{_RUNS}test_a_record_that_does_not_follow_w_is_a_gap_and_what_follows_it_is_behind",),
        (Change(_FUSED, "if seq ~= next_seq then answer = 'G'", "if not next_seq then answer = 'G'"),),
    ),
    Mutant(
        "fused-epoch-unchecked",
        "A paused former owner of a shard goes on writing entries and W.",
        ("M4", "F-05"),
        (f"{_RUNS}test_a_stale_owner_writes_nothing_and_does_not_fail_the_shards_it_still_owns",),
        (
            Change(
                _FUSED,
                "if (owners[s] or ''):sub(1, 8) ~= epoch then refused = 'S'",
                "if (owners[s] or ''):sub(1, 8) ~= epoch then refused = nil",
            ),
        ),
    ),
    Mutant(
        "general-epoch-unchecked",
        "A paused former owner of a shard finishes dispatches and moves W.",
        ("M4", "F-05"),
        (
            "tests/lua/test_finish_dispatch.py::test_not_begun_another_digest_gap_and_stale_owner_move_nothing",
        ),
        (
            Change(
                "lua/finish_dispatch.lua",
                "if (redis.call('HGET', owner, slot) or ''):sub(1, 8) ~= epoch then return 'S' end\n",
                "",
            ),
        ),
    ),
    Mutant(
        "dispatch-digest-not-compared",
        "Other content under a known dispatch id passes as a duplicate, so one of the two is lost silently.",
        ("M6", "X9"),
        (
            f"{_RUNS}test_the_same_dispatch_with_another_digest_stops_its_shard_and_no_other",
            f"{_RUNS}test_two_digests_under_one_dispatch_inside_one_run_are_a_mismatch",
        ),
        (Change(_FUSED, "elseif old and old:sub(1, 8) ~= value:sub(1, 8) then", "elseif false then"),),
    ),
    Mutant(
        "begin-digest-not-compared",
        "The general path goes on with other content under a dispatch id that was begun.",
        ("M6",),
        ("tests/lua/test_begin_dispatch.py::test_another_digest_stale_owner_and_gap_write_nothing",),
        (
            Change(
                "lua/begin_dispatch.lua", "  if known:sub(1, 8) ~= digest then return {'M', day} end\n", ""
            ),
        ),
    ),
    Mutant(
        "duplicate-dispatch-adds-an-entry",
        "A dispatch that comes a second time at a later offset leaves a second entry.",
        ("M7",),
        (f"{_RUNS}test_a_duplicate_dispatch_at_a_later_offset_moves_w_and_adds_no_entry",),
        (Change(_FUSED, "if not old then  -- otherwise", "if true then  -- otherwise"),),
    ),
    Mutant(
        "delivery-named-by-its-offset",
        "The mailbox knows a delivery by its place in the log, so a replay by the fan-out is a new delivery.",
        ("M7", "F4", "F-31"),
        (
            f"{_ROLE}test_duplicated_dispatches_leave_each_entry_once",
            "tests/unit/workers/test_spine.py::test_a_fanout_that_goes_back_doubles_nothing",
        ),
        (
            Change(
                "workers/shard_state.py",
                "rules.mailbox_seq_of(base=shard.base, offset=offset), dispatch.dispatch_id,",
                'rules.mailbox_seq_of(base=shard.base, offset=offset), offset.to_bytes(16, "big"),',
            ),
        ),
    ),
    Mutant(
        "w-moved-by-the-begin",
        "W passes a record when it is begun, before its entries are there.",
        ("M3",),
        ("tests/lua/test_begin_dispatch.py::test_a_begin_fixes_digest_and_day_and_is_safe_to_repeat",),
        (
            Change(
                "lua/begin_dispatch.lua",
                "redis.call('PEXPIRE', progress, life_ms)",
                "redis.call('PEXPIRE', progress, life_ms)\n"
                "redis.call('HSET', watermarks, slot, struct.pack('>I8', seq) .. state:sub(9))",
            ),
        ),
    ),
    Mutant(
        "finish-after-a-failed-append",
        "A record is finished although some of its entries were refused.",
        ("M3", "M5"),
        (f"{_ROLE}test_an_append_that_was_not_done_is_never_followed_by_a_finish",),
        (
            Change(
                "workers/serial.py",
                '            self._failpoints.hit("mailbox.entries")\n'
                "            if outcome is not Materialised.DONE:",
                '            self._failpoints.hit("mailbox.entries")\n            if outcome is None:',
            ),
        ),
    ),
    Mutant(
        "append-without-an-answer-taken-for-done",
        "A record is finished although nobody knows whether its entries were written.",
        ("M3", "M5", "F-33"),
        (f"{_ROLE}test_a_failed_step_of_the_general_path_leaves_w_and_is_repeated[False-append_entries]",),
        (
            Change(
                "workers/serial.py",
                "            if isinstance(outcome, BaseException):\n                raise outcome\n",
                "            if isinstance(outcome, BaseException):\n                continue\n",
            ),
        ),
    ),
    Mutant(
        "finish-skipped",
        "The role takes a record for finished after its appends, and the store never hears of it.",
        ("M3", "M8"),
        (f"{_ROLE}test_a_dispatch_begun_on_the_general_path_is_finished_there",),
        (
            Change(
                "workers/serial.py",
                "        outcome = await self._store.finish_dispatch(write, watermark)\n",
                "        outcome = Materialised.DONE\n",
            ),
        ),
    ),
    Mutant(
        "finish-without-progress",
        "W moves and the dispatch is not noted as final, so a replay delivers it once more.",
        ("M3",),
        (
            "tests/lua/test_finish_dispatch.py::test_a_finish_is_completion_and_w_together_and_is_safe_to_repeat",
        ),
        (
            Change(
                "lua/finish_dispatch.lua",
                "  redis.call('HSET', progress, id, digest .. outcome .. day)\n",
                "",
            ),
        ),
    ),
    Mutant(
        "unknown-run-taken-for-done",
        "A run without an answer counts as written: its entries may never have been.",
        ("M4", "M5", "M7"),
        (f"{_ROLE}test_an_unknown_run_is_repeated_and_leaves_each_entry_once",),
        (
            Change(
                "workers/shards.py",
                "            done = []\n            self.pauses.fail_run(run.deliveries, error)\n",
                "            assert error\n",
            ),
        ),
    ),
    Mutant(
        "repeat-told-again",
        "A repeated dispatch is pushed at its own place, and devices count an entry that is not there.",
        ("M7", "M10"),
        (f"{_TOLD}test_a_repeated_dispatch_is_not_told_again_at_a_place_where_nothing_stands",),
        (
            Change(
                "workers/pushes.py",
                "            if outcome is Materialised.DONE:\n                self.push([delivery])\n",
                "            if outcome is not Materialised.PASSED:\n                self.push([delivery])\n",
            ),
        ),
    ),
    Mutant(
        "passed-is-taken-for-standing",
        "A record that is met again on another day is pushed without a look whether its entry stands there.",
        ("M7", "M10"),
        (f"{_TOLD}test_a_repeat_that_is_read_again_after_midnight_is_not_told_either",),
        (
            Change(
                "workers/pushes.py",
                "[next(found) if outcome is Materialised.PASSED",
                "[Materialised.DONE if outcome is Materialised.PASSED",
            ),
        ),
    ),
    Mutant(
        "final-before-is-told-again",
        "What the general path finds final is pushed, although it was finished at an earlier place.",
        ("M7", "M10"),
        (f"{_TOLD}test_a_repeat_on_the_general_path_is_not_told_again_either",),
        (
            Change(
                "workers/serial.py",
                "            return Materialised.PASSED  # final before: here, or at an earlier place\n",
                "            return Materialised.DONE\n",
            ),
        ),
    ),
    Mutant(
        "push-before-w",
        "A session is told of an entry before the store has it.",
        ("M10",),
        (f"{_ROLE}test_a_push_starts_only_after_w_has_moved",),
        (
            Change(
                "workers/shards.py",
                "        runs = [self._call(run) for run in rules.cut_runs(fused)]\n",
                "        runs = [self._call(run) for run in rules.cut_runs(fused)]\n"
                "        self.pushes.push(fused)\n",
            ),
        ),
    ),
    Mutant(
        "echo-lost",
        "The sending device is not told of its own message, so its chain has a hole after every send.",
        ("M10",),
        (f"{_ROLE}test_every_session_is_told_and_the_sending_device_gets_the_echo",),
        (
            Change(
                "workers/pushes.py",
                "                    echo = user == sender and session.device == device\n",
                "                    echo = user == sender and session.device == device\n"
                "                    if echo:\n                        continue\n",
            ),
        ),
    ),
    Mutant(
        "mismatch-tried-again-for-ever",
        "A shard with two contents under one dispatch id retries in silence instead of stopping loudly.",
        ("M6", "X9", "F-32"),
        (f"{_ROLE}test_the_same_dispatch_with_another_digest_stops_the_shard",),
        (
            Change(
                "workers/pauses.py",
                'self._stop_at(shard, write, "the dispatch id is known with another digest")',
                'self.fail(shard, "the dispatch id is known with another digest")',
            ),
        ),
    ),
    Mutant(
        "one-shard-stops-all",
        "A shard that stops takes every other shard of the instance with it.",
        ("X9", "F-20"),
        (f"{_ROLE}test_a_partition_that_jumps_stops_its_shard_alone",),
        (
            Change(
                "workers/pauses.py",
                "        if shard.stopped is None:\n            shard.stopped = StoppedShard(offset,",
                "        for other in self._shards.values():\n            other.held = True\n"
                "            self._pause(other.slot)\n"
                "        if shard.stopped is None:\n            shard.stopped = StoppedShard(offset,",
            ),
        ),
    ),
    Mutant(
        "one-shard-fails-the-run",
        "A refused record refuses the records of all shards behind it in the same call.",
        ("X9",),
        (f"{_RUNS}test_the_same_dispatch_with_another_digest_stops_its_shard_and_no_other",),
        (
            Change(_FUSED, "local state, refused, moved", "local state, _, moved"),
            Change(
                _FUSED, "progress, moves, day_differs = {},", "progress, moves, day_differs, refused = {},"
            ),
        ),
    ),
    Mutant(
        "unreadable-record-passed-over",
        "A record that cannot be read is left out without anybody's word.",
        ("X9", "F-34"),
        (f"{_ROLE}test_an_unreadable_record_stops_its_shard_and_only_the_operator_passes_it",),
        (
            Change(
                "workers/shards.py",
                "                self.pauses.stop(shard, offset, rules.identify(data)[0], str(error))\n"
                "            return None",
                "                shard.sent = mailbox_seq\n            return None",
            ),
        ),
    ),
    Mutant(
        "lost-watermark-accepted",
        "A store whose W fell is written to as if nothing had happened.",
        ("M4",),
        (f"{_ROLE}test_a_store_that_has_lost_its_watermark_is_not_written_to",),
        (Change("workers/pauses.py", "state.watermark < shard.watermark or ", ""),),
    ),
    Mutant(
        "another-log-accepted",
        "A shard reads on in a log that it was not filled from.",
        ("M1",),
        (f"{_ROLE}test_a_shard_without_its_state_or_with_another_log_stays_closed_alone",),
        (Change("qim/domain/mailbox.py", "    if stored_log != log:\n", "    if not stored_log:\n"),),
    ),
    Mutant(
        "queue-without-bound",
        "The queue of a shard in trouble takes its whole partition into memory.",
        ("M2",),
        (
            "tests/unit/workers/test_mailbox_bounds.py::test_a_shard_in_trouble_queues_128_records_and_no_more",
        ),
        (
            Change(
                "workers/pauses.py",
                "        if len(shard.queue) >= MAILBOX_QUEUE_RECORDS_MAX:\n",
                "        if len(shard.queue) >= 100 * MAILBOX_QUEUE_RECORDS_MAX:\n",
            ),
        ),
    ),
    Mutant(
        "two-lanes-in-one-shard",
        "A shard that is being served is offered again, so two records of it run side by side.",
        ("M2",),
        ("tests/unit/workers/test_mailbox_bounds.py::test_the_records_of_a_shard_run_one_after_the_other",),
        (
            Change(
                "workers/pauses.py",
                "if shard.queue and not shard.serving and not shard.held and not shard.in_flight:",
                "if shard.queue and not shard.held and not shard.in_flight:",
            ),
        ),
    ),
    Mutant(
        "fused-forgets-which-dispatch-it-finished",
        "The fused path leaves another state of the shard than the general one.",
        ("M8",),
        ("tests/property/test_mailbox_model.py::test_the_fused_and_the_general_path_leave_the_same_bytes",),
        (Change(_FUSED, ".. state:sub(9, 36) .. moved", ".. state:sub(9)"),),
    ),
    Mutant(
        "fused-days-live-for-ever",
        "The keys of a mailbox day never expire.",
        ("M9",),
        (f"{_RUNS}test_every_key_gets_its_lifetime_with_its_first_entry",),
        (Change(_FUSED, "if marks % 2 ^ n >= 2 ^ (n - 1) then", "if marks < 0 then"),),
    ),
    Mutant(
        "end-of-a-day-forgotten",
        "Where a day ended is not noted, so a cursor from before it is never told to rebuild.",
        ("M9",),
        ("tests/lua/test_turn_day.py::test_a_turn_notes_where_the_old_day_ended_and_is_safe_to_repeat",),
        (
            Change(
                "lua/turn_day.lua",
                "if w > 0 and day > 0 then redis.call('HSET', days, day, string.format('%.0f', w)) end\n",
                "",
            ),
        ),
    ),
    Mutant(
        "day-goes-back",
        "A clock that is set back takes a shard into a day that readers have left.",
        ("M9",),
        ("tests/lua/test_turn_day.py::test_a_day_that_is_ahead_of_the_clock_is_left_alone",),
        (
            Change(
                "lua/turn_day.lua",
                "if day >= today then return day end",
                "if day == today then return day end",
            ),
        ),
    ),
    Mutant(
        "old-cursor-without-rebuild",
        "A cursor older than the oldest kept day gets a page that hides what is gone.",
        ("M9",),
        (
            "tests/lua/test_turn_day.py::test_a_cursor_below_the_floor_must_rebuild_and_one_at_the_floor_need_not",
            "tests/lua/test_read_mailbox.py::test_a_page_runs_over_all_kept_days_in_order_and_over_no_older_one",
        ),
        (Change("lua/read_mailbox.lua", "if after < floor or after > w then", "if after > w then"),),
    ),
    Mutant(
        "cursor-above-w-without-rebuild",
        "A cursor of a lost store is answered with an empty page, for ever.",
        ("M9", "F-39"),
        ("tests/contract/test_mailbox_store.py::test_a_cursor_above_w_is_told_to_rebuild",),
        (Change("lua/read_mailbox.lua", "if after < floor or after > w then", "if after < floor then"),),
    ),
    Mutant(
        "full-page-covers-w",
        "A full page claims to cover everything up to W: what did not fit is never asked for again.",
        (),
        ("tests/lua/test_read_mailbox.py::test_large_entries_fill_a_page_to_its_bytes_and_no_further",),
        (
            Change(
                "lua/read_mailbox.lua",
                "if full then return reply(position, 1, 0) end",
                "if full then return reply(w, 1, 0) end",
            ),
        ),
    ),
    Mutant(
        "held-pushes-not-counted",
        "What a client claims to hold is believed without counting: a lost push is never fetched.",
        (),
        ("tests/contract/test_mailbox_store.py::test_held_entries_are_confirmed_only_by_their_exact_number",),
        (Change("lua/read_mailbox.lua", "if count == held_count then", "if count > 0 then"),),
    ),
    Mutant(
        "mailbox-numbers-from-zero",
        "A mailbox sequence is the offset alone, so a log made anew hands out known numbers again.",
        ("F5",),
        ("tests/unit/test_mailbox_rules.py::test_mailbox_sequences_are_base_plus_offset_below_2_to_48",),
        (Change("qim/domain/mailbox.py", "    seq = base + offset\n", "    seq = 1 + offset\n"),),
    ),
)
