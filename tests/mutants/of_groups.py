"""Mutants of groups: who may send, what a change writes, who sees what, and the rules behind it."""

from typing import Final

from tests.mutants.model import Change, Mutant

_SENDS: Final = "tests/lua/test_group_sends.py::"
_CHANGE: Final = "tests/lua/test_change_membership.py::"
_CREATE: Final = "tests/lua/test_create_group.py::"
_RULES: Final = "tests/unit/test_group_rules.py::"
_RESERVE_LUA: Final = "lua/reserve_messages.lua"
_COMMIT_LUA: Final = "lua/commit_messages.lua"
_CHANGE_LUA: Final = "lua/change_membership.lua"
_CREATE_LUA: Final = "lua/create_group.lua"
_DOMAIN: Final = "qim/domain/groups.py"

_OF_SENDS: Final = (
    Mutant(
        "group-version-unchecked",
        "A send goes to the members that its writer remembers, not to those of its moment.",
        ("G1", "A4", "X16", "F-49"),
        (f"{_SENDS}test_a_send_of_another_version_is_refused_and_consumes_no_sequence[valkey-two_steps]",),
        (
            Change(
                _RESERVE_LUA,
                "return unpack_u64('>I8', head, #head - 7) ~= group.version and -7",
                "return unpack_u64('>I8', head, #head - 7) == 0 and -7",
            ),
        ),
    ),
    Mutant(
        "one-step-group-version-unchecked",
        "The same, where commits go in one step.",
        ("G1", "A4", "X16", "F-49"),
        (f"{_SENDS}test_a_send_of_another_version_is_refused_and_consumes_no_sequence[valkey-one_step]",),
        (
            Change(
                _COMMIT_LUA,
                "return struct.unpack('>I8', head, #head - 7) ~= group.version and -7",
                "return struct.unpack('>I8', head, #head - 7) == 0 and -7",
            ),
        ),
    ),
    Mutant(
        "anybody-may-send",
        "Who left a group, or never was in it, sends to its members.",
        ("G12", "X16"),
        (
            f"{_SENDS}test_who_is_not_in_the_group_may_not_send_whatever_version_is_named[valkey-two_steps]",
            f"{_CHANGE}test_the_last_one_leaves_and_nobody_may_send",
        ),
        (Change(_RESERVE_LUA, "  if not row or byte(row) ~= 1 then return -6 end\n", ""),),
    ),
    Mutant(
        "one-step-anybody-may-send",
        "The same, where commits go in one step.",
        ("G12", "X16"),
        (f"{_SENDS}test_who_is_not_in_the_group_may_not_send_whatever_version_is_named[valkey-one_step]",),
        (Change(_COMMIT_LUA, "  if not row or byte(row) ~= 1 then return -6 end\n", ""),),
    ),
)

_OF_CHANGES: Final = (
    Mutant(
        "change-of-another-version",
        "A change that was planned with other members is done.",
        ("G1", "X16", "F-49"),
        (f"{_CHANGE}test_a_plan_of_another_version_changes_nothing_and_consumes_no_sequence",),
        (
            Change(
                _CHANGE_LUA,
                "if version ~= planned or #ARGV == USERS then return { -7 } end\n",
                "if #ARGV == USERS then return { -7 } end\n",
            ),
        ),
    ),
    Mutant(
        "change-epoch-unchecked",
        "A paused former owner of a slot goes on changing groups.",
        ("X16", "F-05"),
        (f"{_CHANGE}test_a_stale_owner_changes_nobody",),
        (
            Change(
                _CHANGE_LUA,
                "if not held or sub(held, 1, 8) ~= epoch then return { -2 } end",
                "if not held then return { -2 } end",
            ),
        ),
    ),
    Mutant(
        "joiner-sees-the-past",
        "Who joins may read what was said before.",
        ("G5", "A1", "A3"),
        (f"{_CHANGE}test_intervals_follow_join_leave_removal_and_rejoin",),
        (Change(_CHANGE_LUA, "pack('>BI8I8', MEMBER, seq - 1, 0)", "pack('>BI8I8', MEMBER, 0, 0)"),),
    ),
    Mutant(
        "leaver-sees-on",
        "Who left may read the event of it, and whatever stands under the next sequence.",
        ("G6", "A2"),
        (f"{_CHANGE}test_intervals_follow_join_leave_removal_and_rejoin",),
        (
            Change(
                _CHANGE_LUA,
                "sub(rows[i], 2, 9) .. pack('>I8', seq)",
                "sub(rows[i], 2, 9) .. pack('>I8', seq + 1)",
            ),
        ),
    ),
    Mutant(
        "event-counts-as-unread",
        "A join makes the group unread for everybody.",
        ("G8",),
        (f"{_CHANGE}test_an_event_never_counts_as_unread_and_marks_nothing_as_read",),
        (Change(_CHANGE_LUA, "call('ZADD', skips, text, text)\n", ""),),
    ),
    Mutant(
        "repeated-change-not-continued",
        "A repeat of a change whose event is unfinished is told to plan anew instead of going on with it.",
        ("G10", "C4", "X16"),
        (f"{_CHANGE}test_a_repeat_continues_the_same_commit_and_writes_nothing",),
        (
            Change(
                _CHANGE_LUA,
                "local fact = committed or event and call('HGET', pending, event)",
                "local fact = committed",
            ),
        ),
    ),
    Mutant(
        "in-effect-told-too-early",
        "A repeat is told that it is done while the event of the change is not durable yet.",
        ("G10",),
        (
            f"{_CHANGE}test_what_is_in_effect_makes_no_second_event_and_is_told_when_the_first_is_finished",
            f"{_CHANGE}test_an_older_event_that_is_unfinished_keeps_an_empty_plan_waiting",
        ),
        (
            Change(
                _CHANGE_LUA,
                "if tonumber(counters[2] or 0) < tonumber(last_seq or 0) then",
                "if not count then",
            ),
        ),
    ),
    Mutant(
        "only-the-last-event-counts",
        "An older event that is unfinished does not keep an empty plan waiting.",
        ("G10",),
        (f"{_CHANGE}test_an_older_event_that_is_unfinished_keeps_an_empty_plan_waiting",),
        (
            Change(
                _CHANGE_LUA,
                "if tonumber(counters[2] or 0) < tonumber(last_seq or 0) then",
                "if last_event and call('HEXISTS', pending, last_event) == 1 then",
            ),
        ),
    ),
    Mutant(
        "request-forgotten",
        "An operator's repeat adds a user again who has left since.",
        ("X11",),
        (f"{_CHANGE}test_an_operators_request_is_remembered_whatever_its_user_did_since",),
        (Change(_CHANGE_LUA, "if known[1] then\n", "if known[1] and not event then\n"),),
    ),
    Mutant(
        "empty-request-forgotten",
        "A request that had nothing to do is done when it is repeated later.",
        ("X11",),
        (f"{_CHANGE}test_a_request_is_remembered_for_a_day_also_when_it_had_nothing_to_do",),
        (Change(_CHANGE_LUA, "  remember('0', count, version)\n", ""),),
    ),
    Mutant(
        "request-content-not-compared",
        "Another change under a known request id is answered with the result of the first.",
        ("X11", "C5"),
        (f"{_CHANGE}test_a_request_id_used_for_something_else_is_a_conflict_and_writes_nothing",),
        (Change(_CHANGE_LUA, "  if known[1] ~= asked then return { -1 } end\n", ""),),
    ),
    Mutant(
        "old-version-thrown-away",
        "A replay of an older message finds no members any more.",
        ("G2", "F6"),
        (f"{_CHANGE}test_every_version_keeps_the_members_of_its_moment",),
        (Change(_CHANGE_LUA, "call('ZADD', garbage, unpack(due))\n", "call('HDEL', snapshots, version)\n"),),
    ),
    Mutant(
        "event-without-its-record",
        "A change takes its sequence, and the event itself is not written with it.",
        ("G3", "C3"),
        (f"{_CHANGE}test_a_join_writes_everything_in_one_call_under_one_tag",),
        (Change(_CHANGE_LUA, "call('HSET', records, text, record)\n", ""),),
    ),
    Mutant(
        "change-written-before-all-is-decided",
        "A change that fails half-way leaves a sequence without members, or members without a version.",
        ("C3", "X16"),
        (f"{_CHANGE}test_a_wrong_type_under_any_key_is_refused_before_any_write",),
        (Change(_CHANGE_LUA, "call('ZCARD', skips)\ncall('ZCARD', garbage)\n", ""),),
    ),
    Mutant(
        "full-store-changes-groups",
        "A store that is full goes on taking changes of members.",
        ("X16", "F-12"),
        (f"{_CHANGE}test_a_full_server_changes_nobody_and_still_finishes_events",),
        (Change(_CHANGE_LUA, "#!lua\n", "#!lua flags=allow-oom\n"),),
    ),
    Mutant(
        "stranger-is-told-the-count",
        "A LEAVE of somebody who never was in the group is answered as one that was done.",
        ("G13",),
        (f"{_CHANGE}test_who_left_already_may_leave_again_and_who_was_never_there_is_told_nothing",),
        (
            Change(
                _CHANGE_LUA,
                "  if op == LEAVE and not call('HGET', members, actor) then return { -6 } end\n",
                "",
            ),
        ),
    ),
)

_OF_THE_REST: Final = (
    Mutant(
        "group-id-taken-twice",
        "Other members under a known request are answered as if they were in the group.",
        ("C5",),
        (f"{_CREATE}test_other_content_under_the_same_id_is_a_conflict_and_writes_nothing",),
        (Change(_CREATE_LUA, "return known == digest and 0 or -1", "return 0"),),
    ),
    Mutant(
        "first-members-see-less",
        "The first members of a group do not see its first message.",
        ("G4",),
        (f"{_CREATE}test_the_first_members_see_everything_and_no_event_tells_of_them",),
        (Change(_CREATE_LUA, "pack('>BI8I8', STATE_MEMBER, 0, 0)", "pack('>BI8I8', STATE_MEMBER, 1, 0)"),),
    ),
    Mutant(
        "torn-snapshot-is-nobody",
        "A part of a snapshot that is missing leaves its users out of the audience.",
        ("F6",),
        (f"{_CREATE}test_a_torn_snapshot_is_an_error_and_never_a_smaller_audience[valkey-part]",),
        (
            Change(
                "qim/adapters/membership_redis.py",
                "    if not part or len(part) % ID_BYTES:\n"
                '        raise ValueError("a part of a snapshot is missing or torn")\n',
                "    if not part:\n        return ()\n",
            ),
        ),
    ),
    Mutant(
        "lower-end-closed",
        "The interval holds the sequence of joined_at itself: one message from before.",
        ("G6", "G11"),
        (
            f"{_RULES}test_visible_is_the_open_interval",
            f"{_RULES}test_history_from_earliest_to_upper_is_exactly_what_is_visible_and_kept",
        ),
        (Change(_DOMAIN, "return joined_at < seq and", "return joined_at <= seq and"),),
    ),
    Mutant(
        "event-shown-to-who-left",
        "History of who left ends at the event instead of before it.",
        ("G6", "G11", "A2"),
        (
            f"{_RULES}test_history_from_earliest_to_upper_is_exactly_what_is_visible_and_kept",
            f"{_RULES}test_who_left_sees_neither_the_event_nor_what_follows",
        ),
        (Change(_DOMAIN, "min(head, Seq(left_at - 1))", "min(head, left_at)"),),
    ),
    Mutant(
        "everybody-is-told",
        "In a group above the bound everybody is told who comes and goes.",
        ("G7", "X4"),
        (f"{_RULES}test_a_group_is_told_up_to_the_bound_and_above_it_only_those_affected",),
        (
            Change(
                _DOMAIN,
                "if len(members_after) > broadcast_members_max:",
                "if len(members_after) > 10 * broadcast_members_max:",
            ),
        ),
    ),
    Mutant(
        "count-before-decides",
        "The members before the change, not after it, say whether the group is told.",
        ("G7",),
        (f"{_RULES}test_the_count_after_the_change_decides",),
        (
            Change(
                _DOMAIN,
                "audience = audience_of_event(after, changed,",
                "audience = audience_of_event(membership.members, changed,",
            ),
        ),
    ),
    Mutant(
        "listed-audience-not-marked",
        "The header of an event does not say that its audience is listed, so every member is told.",
        ("F2", "G7"),
        (
            "tests/unit/test_records.py::test_group_header_says_where_its_audience_is_listed",
            f"{_RULES}test_an_event_is_a_control_message_of_the_group_that_every_hop_can_carry",
        ),
        (
            Change(
                "qim/records.py",
                "audience = MEMBERS_AT_VERSION if record.audience is None else LISTED_IN_RECORD",
                "audience = MEMBERS_AT_VERSION",
            ),
        ),
    ),
    Mutant(
        "affected-not-told",
        "Who was removed from a small group never hears of it.",
        ("G7",),
        (
            f"{_RULES}test_a_group_is_told_up_to_the_bound_and_above_it_only_those_affected",
            f"{_RULES}test_who_is_affected_is_always_told_and_nobody_twice",
        ),
        (Change(_DOMAIN, "tuple(sorted({*members_after, *affected}))", "tuple(sorted({*members_after}))"),),
    ),
    Mutant(
        "successor-by-id-alone",
        "The group passes to the smallest id, however late it joined.",
        ("X14",),
        (
            f"{_RULES}test_the_owner_is_followed_by_who_joined_first_then_by_the_smallest_id",
            f"{_CHANGE}test_the_owner_who_leaves_is_followed_by_who_joined_first_then_by_the_smallest_id",
        ),
        (Change(_DOMAIN, "staying = ((joined_at, user) for", "staying = ((Seq(0 * joined_at), user) for"),),
    ),
    Mutant(
        "event-in-the-name-of-the-next-owner",
        "The removal of an owner is recorded as sent by the next one.",
        ("G9",),
        (f"{_CHANGE}test_the_owner_who_leaves_is_followed_by_who_joined_first_then_by_the_smallest_id",),
        (
            Change(
                _DOMAIN,
                "sender = actor if op is MembershipOp.LEAVE else membership.owner",
                "sender = actor if op is MembershipOp.LEAVE else owner_after",
            ),
        ),
    ),
    Mutant(
        "leave-for-somebody-else",
        "A user takes others out of a group by leaving for them.",
        ("G13", "T8"),
        (f"{_RULES}test_a_change_that_nobody_may_ask_for_is_refused_whoever_the_members_are",),
        (
            Change(
                _DOMAIN,
                "if op is MembershipOp.LEAVE and named != (actor,):",
                "if op is MembershipOp.LEAVE and actor == OPERATOR:",
            ),
        ),
    ),
    Mutant(
        "event-id-without-its-version",
        "A rejoin has the id of the first join, and is taken for a repeat of it.",
        ("G10",),
        (f"{_RULES}test_the_id_of_an_event_comes_from_everything_that_makes_it_this_change",),
        (
            Change(
                _DOMAIN,
                "fields = _EVENT_ID_FIELDS.pack(tenant, group, op, actor, version)\n"
                "    return ClientMessageId(",
                "fields = _EVENT_ID_FIELDS.pack(tenant, group, op, actor, 0 * version)\n"
                "    return ClientMessageId(",
            ),
        ),
    ),
)

_PLAN: Final = "qim/domain/fanout.py"
_PLANS: Final = "tests/unit/test_fanout_rules.py::"
_FANOUT: Final = "tests/unit/workers/test_fanout_groups.py::"
_SPINE: Final = "tests/unit/workers/test_spine_groups.py::"
_AUDIENCES: Final = "tests/unit/workers/test_audiences.py::"

_OF_DELIVERY: Final = (
    Mutant(
        "group-message-to-nobody",
        "A group message whose members cannot be read is delivered to nobody and counts as done.",
        ("F6", "X9"),
        (
            f"{_PLANS}test_a_group_message_without_its_members_is_refused_and_never_sent_to_nobody",
            f"{_FANOUT}test_members_that_are_gone_stop_the_partition_only_and_never_become_nobody",
        ),
        (
            Change(
                _PLAN,
                '        raise RecordCorrupt(f"the members at version {version} cannot be read")\n',
                "        return {}\n",
            ),
        ),
    ),
    Mutant(
        "members-away-are-nobody",
        "A store that does not answer is taken for one without members: the partition stops for nothing.",
        ("F6",),
        (f"{_FANOUT}test_a_store_of_members_that_is_away_is_waited_for",),
        (
            Change(
                "workers/fanout.py",
                "                await asyncio.sleep(backoff_ms(failed) / 1000)\n",
                "                return NO_SNAPSHOTS\n",
            ),
        ),
    ),
    Mutant(
        "one-missing-snapshot-for-all",
        "One group without its members makes every group of the batch one without members.",
        ("F6",),
        (f"{_AUDIENCES}test_members_that_are_not_there_are_left_out_alone",),
        (
            Change(
                "workers/audiences.py",
                "                return await self._ask_apart(instance, wanted)\n",
                "                return {}\n",
            ),
        ),
    ),
    Mutant(
        "members-of-any-version",
        "A message is planned with whatever members of the group are at hand.",
        ("F2", "G2"),
        (f"{_PLANS}test_the_members_of_another_version_do_not_count",),
        (
            Change(
                _PLAN,
                "header.conversation, version))\n",
                "header.conversation, version)) or next(iter(snapshots.values()), None)\n",
            ),
        ),
    ),
    Mutant(
        "parts-without-numbers",
        "The parts of a large shard have one dispatch id: all but the first count as repeats.",
        ("F2",),
        (f"{_PLANS}test_many_members_of_one_shard_get_parts_each_with_an_id_of_its_own",),
        (
            Change(
                _PLAN,
                "        _dispatch(outbox_record, shard, recipients, part)\n",
                "        _dispatch(outbox_record, shard, recipients, 0 * part)\n",
            ),
        ),
    ),
    Mutant(
        "event-to-all-members",
        "An event goes to the members at its version, where those are at hand, and not to who left with it.",
        ("F2", "G7"),
        (f"{_PLANS}test_an_event_goes_to_those_that_it_lists_and_needs_no_members",),
        (
            Change(
                _PLAN,
                "    if mark == LISTED_IN_RECORD:\n",
                "    if snapshots:\n        return next(iter(snapshots.values()))\n"
                "    if mark == LISTED_IN_RECORD:\n",
            ),
        ),
    ),
    Mutant(
        "stranger-speaks-in-a-group",
        "A message of who is no member of the version is delivered to all who are.",
        ("G12",),
        (f"{_PLANS}test_a_message_of_who_is_no_member_is_refused",),
        (
            Change(
                _PLAN,
                '        raise RecordCorrupt(f"the sender is no member at version {version}")\n',
                "        pass\n",
            ),
        ),
    ),
    Mutant(
        "part-for-another-shard",
        "A part of a group message is delivered to users whose mailbox lives in another shard.",
        ("F2",),
        (
            "tests/unit/test_mailbox_rules.py::test_a_part_of_a_group_message_names_users_of_its_shard_each_once_in_order",
        ),
        (
            Change(
                "qim/domain/mailbox.py",
                "    if any(shard_of(tenant, user) != dispatch.shard for user in recipients):\n",
                "    if all(shard_of(tenant, user) != dispatch.shard for user in recipients):\n",
            ),
        ),
    ),
    Mutant(
        "only-the-first-chunk",
        "Of a large group's members in a shard the first 64 get the message, and it counts as done.",
        ("M3", "F2"),
        (f"{_SPINE}test_a_message_to_ten_thousand_reaches_each_once_and_delays_no_order",),
        (
            Change(
                "workers/serial.py",
                "for start in range(0, len(recipients), APPEND_ENTRIES_MAX)\n",
                "for start in range(0, APPEND_ENTRIES_MAX, APPEND_ENTRIES_MAX)\n",
            ),
        ),
    ),
    Mutant(
        "resumed-behind-the-stop",
        "A partition that is resumed while members are awaited goes on behind the record that stopped it.",
        ("F3", "X9"),
        (f"{_FANOUT}test_a_partition_that_is_resumed_while_members_are_awaited_loses_nothing",),
        (
            Change(
                "workers/fanout.py",
                "left = [record for record in piece if record.partition not in stopped]",
                "left = [record for record in piece if record.partition not in self.stopped]",
            ),
        ),
    ),
    Mutant(
        "group-message-not-missed",
        "A broken dispatch partition is called whole although it missed group messages.",
        ("F3", "F-34"),
        (f"{_FANOUT}test_a_broken_dispatch_partition_gets_its_group_messages_when_it_is_whole",),
        (Change("workers/missed.py", "return snapshot_of(data) is not None or any(", "return any("),),
    ),
    Mutant(
        "members-gone-since-passed-over",
        "A broken dispatch partition is called whole without a message whose members have gone meanwhile.",
        ("F6",),
        (f"{_FANOUT}test_a_broken_dispatch_partition_whose_members_are_gone_since_is_not_called_whole",),
        (
            Change(
                "workers/missed.py",
                "if (record.partition, record.offset) not in self._given_up:",
                "if False:",
            ),
        ),
    ),
    Mutant(
        "group-without-a-bound",
        "A group grows until the parts of a shard have no numbers left; then its messages stop everybody.",
        ("X14",),
        (f"{_RULES}test_a_group_grows_to_its_bound_and_no_further",),
        (Change(_DOMAIN, "len(after) > GROUP_MEMBERS_MAX", "len(after) > 2 * GROUP_MEMBERS_MAX"),),
    ),
)

OF_GROUPS: Final = (*_OF_SENDS, *_OF_CHANGES, *_OF_THE_REST, *_OF_DELIVERY)
