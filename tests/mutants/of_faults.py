"""Mutants of the fault rows: what happens when processes, stores and disks fail, and of waiting for company.

Those that are long take a minute each or need a tool that a bare machine may lack (strace, a C compiler); a
plain run leaves them out.
"""

from typing import Final

from tests.mutants.model import Change, Mutant

_PIPE_TESTS: Final = "tests/unit/adapters/test_redis_pipe.py::"
_GATEWAY: Final = "tests/unit/workers/test_gateway.py::"
_POWER: Final = "tests/faults/test_power_loss.py::"
_LONG: Final = "tests/faults/test_rows_store_long.py::"
_PIPE: Final = "qim/adapters/redis_pipe.py"
_GUARDS: Final = "qim/domain/guards.py"

OF_FAULTS: Final = (
    Mutant(
        "children-outlive-their-supervisor",
        "Workers of a killed supervisor live on and keep their slots, beside those of the next one.",
        ("F-06",),
        ("tests/process/test_supervisor.py::test_children_die_with_their_supervisor",),
        (
            Change(
                "workers/child.py",
                "    _libc.prctl(PR_SET_PDEATHSIG, signal_number)\n",
                "    _libc.prctl(PR_SET_PDEATHSIG, 0)\n",
            ),
        ),
    ),
    Mutant(
        "slow-store-without-bound",
        "A store that answers slowly fills the memory of its workers with commands.",
        ("F-16",),
        (f"{_PIPE_TESTS}test_too_much_in_flight_is_refused_and_the_rest_goes_on",),
        (
            Change(
                _PIPE,
                "if len(self._waiting) >= STORE_INFLIGHT_COMMANDS_MAX or",
                "if len(self._waiting) > 9 * STORE_INFLIGHT_COMMANDS_MAX or",
            ),
        ),
    ),
    Mutant(
        "late-answer-says-no",
        "A write whose answer did not come in time counts as never done.",
        ("F-16", "F-23"),
        (f"{_PIPE_TESTS}test_a_time_out_closes_the_connection_and_all_in_flight_is_unknown",),
        (
            Change(
                _PIPE,
                '            self.close("no answer within the time limit")\n        else:',
                '            self._unwritten = [b""] * len(self._waiting)\n'
                '            self.close("no answer within the time limit")\n        else:',
            ),
        ),
    ),
    Mutant(
        "echo-never-sent",
        "An echo waits for company that never comes: the place of an own message is not told.",
        ("M10",),
        (f"{_GATEWAY}test_a_push_carries_the_entry_and_the_sender_gets_the_echo",),
        (Change("workers/outbound.py", "                peer.mark()\n", "                continue\n"),),
    ),
    Mutant(
        "position-stored-too-seldom",
        "The fan-out stores its position every quarter of an hour, and a restart delivers all of that again.",
        ("F4", "F-01"),
        ("tests/unit/workers/test_fanout.py::test_a_kill_replays_at_most_the_last_batch[fanout.stored]",),
        (
            Change(
                "workers/fanout.py",
                "await asyncio.sleep(FANOUT_POSITION_INTERVAL_MS / 1000)",
                "await asyncio.sleep(FANOUT_POSITION_INTERVAL_MS * 9)",
            ),
        ),
    ),
    Mutant(
        "flush-once-a-second",
        "What a store must be set to allows a second of acknowledged messages to be lost with the power.",
        ("F-10", "C10"),
        (f"{_POWER}test_always_loses_nothing_at_twenty_random_instants",),
        (Change(_GUARDS, '"appendfsync": "always"', '"appendfsync": "everysec"'),),
        is_long=True,
    ),
    Mutant(
        "no-flush-during-a-rewrite",
        "What is acknowledged while a store rewrites its file is lost with the power.",
        ("F-10", "C10"),
        (f"{_POWER}test_always_loses_nothing_at_any_step_of_a_rewrite",),
        (Change(_GUARDS, '"no-appendfsync-on-rewrite": "no"', '"no-appendfsync-on-rewrite": "yes"'),),
        is_long=True,
    ),
    Mutant(
        "verdict-without-a-look",
        "The verdict on a run calls everything clean, a loss as well.",
        ("F-09", "C10"),
        (f"{_LONG}test_with_the_guard_off_a_kill_loses_what_was_acknowledged_and_the_verdict_says_so",),
        (
            Change(
                "tests/process/load.py",
                "        for one, other in self.pairs:\n            assert not one.unstable",
                "        for one, other in self.pairs[:0]:\n            assert not one.unstable",
            ),
        ),
        is_long=True,
    ),
    Mutant(
        "ended-store-left-alone",
        "An embedded store that ended because it could not write is not started again.",
        ("F-11",),
        (f"{_LONG}test_a_file_that_may_not_grow_ends_the_store_until_it_may",),
        (
            Change(
                "workers/dev.py",
                "        if self._store.has_ended() and not self._waits_for_room():\n",
                "        if self._store.has_ended() and self._waits_for_room():\n",
            ),
        ),
        is_long=True,
    ),
)
