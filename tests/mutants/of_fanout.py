"""Mutants of the fan-out: plans that differ, records that are missing, positions that run ahead."""

from typing import Final

from tests.mutants.model import Change, Mutant

_ROLE: Final = "tests/unit/workers/test_fanout.py::"
_PLANNER: Final = "tests/property/test_planners.py::test_the_same_record_gives_the_same_plan_byte_for_byte"
_PLAN: Final = "qim/domain/fanout.py"

OF_FANOUT: Final = (
    Mutant(
        "plan-differs-from-time-to-time",
        "A replay of a record gives other bytes than the first time, so its deliveries are new ones.",
        ("F1",),
        (_PLANNER,),
        (Change(_PLAN, "shard=shard, part=part,", "shard=shard, part=shard_of.cache_info().hits % 7,"),),
    ),
    Mutant(
        "no-copy-for-the-sender",
        "Only the recipient gets a message; the sender's other devices never see it.",
        ("F2",),
        (_PLANNER, f"{_ROLE}test_a_message_reaches_the_shards_of_sender_and_recipient"),
        (
            Change(
                _PLAN,
                "    return (one, other) if first < second else (other, one)\n",
                "    return (other,) if header.sender == low else (one,)\n",
            ),
        ),
    ),
    Mutant(
        "position-before-the-work",
        "The position is stored before the dispatches are durable: a crash in between loses the batch.",
        ("F3",),
        (f"{_ROLE}test_the_position_waits_until_every_dispatch_is_durable",),
        (
            Change(
                "workers/fanout.py",
                "        await self._await_append(issued)\n",
                "        self._late = asyncio.ensure_future(self._await_append(issued))\n",
            ),
        ),
    ),
    Mutant(
        "unknown-append-forgotten",
        "A batch whose append has no answer counts as done.",
        ("F3", "F4"),
        (f"{_ROLE}test_an_unknown_append_is_repeated_with_the_same_bytes",),
        (
            Change(
                "workers/fanout.py",
                "            except (StoreUnknown, StoreRefused) as error:\n"
                "                if is_news(attempts + 1):",
                "            except (StoreUnknown, StoreRefused) as error:\n                wanted = []\n"
                "                if is_news(attempts + 1):",
            ),
        ),
    ),
    Mutant(
        "position-never-stored",
        "The fan-out remembers its position in memory only, and begins anew after every restart.",
        ("F4", "F-01"),
        (f"{_ROLE}test_a_kill_replays_at_most_the_last_batch[fanout.stored]",),
        (
            Change(
                "workers/fanout.py",
                "        await self._stores[instance].store_positions(GROUP, positions)\n",
                "",
            ),
        ),
    ),
    Mutant(
        "poison-record-passed-over",
        "A record that cannot be planned is left out without anybody's word.",
        ("X9",),
        (f"{_ROLE}test_a_poison_record_stops_its_partition_only_and_keeps_its_place",),
        (
            Change(
                "workers/fanout.py",
                "            except RecordCorrupt as error:\n"
                "                self._stop(partition, offset, str(error))\n",
                "            except RecordCorrupt:\n                reached[partition] = offset\n",
            ),
        ),
    ),
    Mutant(
        "skip-ahead-of-the-work",
        "A skip stores its position although records before it are still on their way.",
        ("F3",),
        (
            "tests/unit/workers/test_fanout_skip.py::test_a_skip_waits_for_the_records_before_it_or_is_refused",
        ),
        (
            Change(
                "workers/fanout.py",
                "        await self._await_durable_before(slot, offset)\n",
                "",
            ),
        ),
    ),
    Mutant(
        "broken-partition-not-missed",
        "What a broken dispatch partition did not take is forgotten, and the position passes it.",
        ("F3", "X9", "F-34"),
        (f"{_ROLE}test_a_broken_dispatch_partition_stops_nobody_else_and_gets_everything_when_it_is_whole",),
        (
            Change(
                "workers/missed.py",
                "                places[partition] = offset\n\n    def cap",
                "                pass\n\n    def cap",
            ),
        ),
    ),
    Mutant(
        "position-falls",
        "A late or repeated store of a position sets it back.",
        (),
        ("tests/lua/test_store_position.py::test_positions_rise_and_a_lower_one_changes_nothing",),
        (
            Change(
                "lua/store_position.lua",
                "if not known or known < tonumber(ARGV[2 * i]) then",
                "if not known or known ~= tonumber(ARGV[2 * i]) then",
            ),
        ),
    ),
)
