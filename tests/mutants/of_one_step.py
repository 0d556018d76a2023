"""Mutants of the commit in one step, where one server holds the conversations and the Outbox."""

from typing import Final

from tests.mutants.model import Change, Mutant

_TESTS: Final = "tests/lua/test_commit_messages.py::"
_LUA: Final = "lua/commit_messages.lua"
_CONTRADICTED = "test_an_outbox_that_contradicts_its_counter_is_left_to_the_long_way"
_HOLE: Final = (
    "tests/field/test_commit_order.py"
    "::test_what_is_committed_behind_a_hole_waits_in_history_and_passes_nobodys_cursor"
)

OF_ONE_STEP: Final = (
    Mutant(
        "one-step-duplicate-not-recognised",
        "A repeat within the two hours gets a second sequence, where commits go in one step.",
        ("C4", "X16"),
        (f"{_TESTS}test_a_repeat_gets_its_coordinates_and_writes_nothing",),
        (
            Change(
                _LUA,
                "local value = committed[i] or recorded[i] or values[first[key]]",
                "local value = recorded[i] or values[first[key]]",
            ),
        ),
    ),
    Mutant(
        "one-step-identity-not-compared",
        "Other content under a known id is answered with the first one's coordinates, in one step.",
        ("C5", "X16"),
        (
            f"{_TESTS}test_a_refusal_consumes_no_sequence_and_writes_nothing",
            f"{_TESTS}test_the_same_key_twice_in_a_run_meets_its_earlier_twin",
        ),
        (Change(_LUA, "value and sub(value, 1, 36) ~= sub(head, 4, 39) then", "value and not head then"),),
    ),
    Mutant(
        "one-step-epoch-unchecked",
        "A paused former owner of a slot goes on committing in one step.",
        ("C7", "X16", "F-05"),
        (f"{_TESTS}test_a_stale_owner_is_told_and_writes_nothing",),
        (
            Change(
                _LUA,
                "stale[s] = not stale[s] or sub(stale[s], 1, 8) ~= ARGV[8 + slots + s]",
                "stale[s] = not stale[s]",
            ),
        ),
    ),
    Mutant(
        "one-step-over-a-hole",
        "A commit in one step moves the visible head over a message that is not durable yet.",
        ("C7", "X5", "F-04", "O05"),
        (
            f"{_TESTS}test_an_unfinished_message_sends_its_conversation_the_long_way_and_no_other",
            f"{_HOLE}[stalled]",
        ),
        (Change(_LUA, "offset >= 0 and n == h and n or -1", "offset >= 0 and n or -1"),),
    ),
    Mutant(
        "one-step-although-the-log-contradicts-itself",
        "Messages are committed in one step although the Outbox and its counter do not fit together.",
        (),
        (f"{_TESTS}{_CONTRADICTED}[valkey-counter behind]",),
        (Change(_LUA, "> 0 then offset = -1 end", "> 0 then offset = offset + 0 end"),),
    ),
    Mutant(
        "one-step-twin-of-a-refused-append",
        "When the stream refuses a run, a repeat in the same run is still told that it is committed.",
        ("C2", "C4"),
        (f"{_TESTS}test_a_twin_of_what_the_stream_refused_is_not_taken_for_written",),
        (
            Change(
                _LUA,
                "for i = 1, items do answers[i] = first[KEYS[key_at + i]] and -5 or answers[i] end",
                "for _, i in ipairs(news) do answers[i] = -5 end",
            ),
        ),
    ),
    Mutant(
        "one-step-window-shortened",
        "The idempotency window of a commit in one step ends a minute early.",
        ("C6",),
        (f"{_TESTS}test_one_step_leaves_exactly_what_two_steps_leave",),
        (Change(_LUA, "format('%d', now + window)", "format('%d', now + window - 60000)"),),
    ),
    Mutant(
        "one-step-record-differs",
        "The record that the server builds is not the one that the writer would have built.",
        ("F5",),
        (f"{_TESTS}test_the_server_builds_the_record_that_the_writer_would_build",),
        (Change(_LUA, ".. pack('>I8', seq) .. sub(frame, 9)", ".. pack('>I8', seq - 1) .. sub(frame, 9)"),),
    ),
    Mutant(
        "one-step-while-the-server-is-full",
        "A full store goes on committing new messages in one step.",
        ("X16", "F-12"),
        (f"{_TESTS}test_a_full_server_refuses_the_run_whole",),
        (Change(_LUA, "#!lua\n", "#!lua flags=allow-oom\n"),),
    ),
)
