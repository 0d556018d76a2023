"""Mutants of the writer's part in groups: messages to them, changes of members, what members read."""

from typing import Final

from tests.mutants.model import Change, Mutant

_SENDS: Final = "tests/unit/workers/test_group_sends.py::"
_ROUTES: Final = "tests/unit/workers/test_group_routes.py::"
_CHANGES: Final = "tests/unit/workers/test_group_changes.py::"
_READS: Final = "tests/unit/workers/test_group_reads.py::"
_OPERATOR: Final = "tests/unit/workers/test_operator_groups.py::"
_CTL: Final = "tests/unit/ctl/test_membership.py::"
_COMMITS: Final = "workers/commits.py"
_READER: Final = "workers/group_reads.py"
_DOMAIN: Final = "qim/domain/groups.py"
_CHANGER: Final = "workers/group_changes.py"
_PLANNER: Final = "qim/domain/writer.py"

_OF_SENDS: Final = (
    Mutant(
        "group-send-without-its-version",
        "A message to a group is sent as if nobody had to be compared: whoever is no member sends too.",
        ("G1", "G12"),
        (
            f"{_SENDS}test_who_is_no_member_any_more_is_refused_and_consumes_nothing",
            f"{_SENDS}test_members_that_change_each_time_end_in_a_refusal_that_consumed_nothing",
        ),
        (
            Change(
                "workers/sending.py",
                "planned.outbox_frame, planned.record.membership_version,",
                "planned.outbox_frame, 0 * planned.record.membership_version,",
            ),
        ),
    ),
    Mutant(
        "changed-members-are-refused-at-once",
        "A change of members at the same moment is left to the client, although another attempt settles it.",
        ("G1", "F-49"),
        (f"{_SENDS}test_after_a_change_a_message_goes_to_the_new_members_and_consumes_one_sequence",),
        (Change(_COMMITS, "for _attempt in range(MEMBERSHIP_RETRIES_MAX):", "for _attempt in range(0):"),),
    ),
    Mutant(
        "one-attempt-too-many",
        "The writer tries more often than it says while the members keep changing.",
        ("G1", "X16"),
        (f"{_SENDS}test_members_that_change_each_time_end_in_a_refusal_that_consumed_nothing",),
        (
            Change(
                _COMMITS,
                "for _attempt in range(MEMBERSHIP_RETRIES_MAX):",
                "for _attempt in range(MEMBERSHIP_RETRIES_MAX + 1):",
            ),
        ),
    ),
    Mutant(
        "retried-with-the-version-of-before",
        "A message is tried again with the version that was refused.",
        ("G1", "G2"),
        (
            f"{_SENDS}test_after_a_change_a_message_goes_to_the_new_members_and_consumes_one_sequence",
            f"{_SENDS}test_the_retried_record_says_the_same_version_in_all_its_places",
        ),
        (
            Change(
                _PLANNER,
                "structs.replace(planned, record=record, record_bytes=record_bytes, outbox_frame=frame)",
                "(record, record_bytes, frame) and planned",
            ),
        ),
    ),
    Mutant(
        "group-of-another-owner",
        "Messages to one group go to different workers, by who sends them.",
        ("C1",),
        (f"{_ROUTES}test_all_that_is_about_a_group_goes_to_the_owner_of_its_conversation",),
        (
            Change(
                "workers/router.py",
                "self._owner_of(route_group(request.tenant, GroupId(named)))",
                "self._owner_of(route_direct(request.tenant, request.user, UserId(named)))",
            ),
        ),
    ),
    Mutant(
        "groups-where-no-store-has-them",
        "A store that cannot change members and sequence in one step takes messages to groups all the same.",
        ("G14",),
        (f"{_SENDS}test_without_a_store_of_groups_a_message_to_one_is_told_as_unsupported",),
        (
            Change(
                _PLANNER,
                "    if versions is None:\n"
                '        raise Unsupported("groups are not offered by this server")\n'
                "    return versions.get(",
                "    return (versions or {}).get(",
            ),
        ),
    ),
)

_OF_CHANGES: Final = (
    Mutant(
        "change-told-before-the-outbox",
        "A change is told although its event may not lie in the Outbox.",
        ("C2",),
        (
            f"{_CHANGES}test_an_event_that_may_not_lie_in_the_outbox_is_told_as_unknown_and_a_repeat_settles_it",
        ),
        (Change(_CHANGER, "if not sending.durable:", "if sending.seq < 0:"),),
    ),
    Mutant(
        "event-left-to-the-recoverer",
        "A change is told while its event waits for the recoverer, and so do all messages behind it.",
        ("G3", "C2"),
        (f"{_CHANGES}test_who_leaves_is_told_the_count_and_an_event_in_the_outbox_says_so",),
        (
            Change(
                _CHANGER,
                "                    await self._finish(result.event)\n                    return result\n",
                "                    return result\n",
            ),
        ),
    ),
    Mutant(
        "overtaken-change-given-up",
        "A change that another one overtakes is the client's business.",
        ("G1",),
        (f"{_CHANGES}test_a_plan_that_is_overtaken_is_made_anew",),
        (Change(_CHANGER, "in range(MEMBERSHIP_RETRIES_MAX + 1):", "in range(1):"),),
    ),
    Mutant(
        "order-without-its-request",
        "A repeated order of an operator is done again, whatever happened since.",
        ("X11",),
        (f"{_CHANGES}test_a_repeated_order_gets_its_first_result_whatever_happened_since",),
        (Change(_CHANGER, "            order.request,\n", "            None,\n"),),
    ),
    Mutant(
        "change-not-noted",
        "The writer sends to the members from before a change that it has just made itself.",
        ("G3",),
        (f"{_CHANGES}test_who_leaves_is_told_the_count_and_an_event_in_the_outbox_says_so",),
        (
            Change(
                _CHANGER,
                "                    self._versions.note(place.conversation, result.version)\n",
                "",
            ),
        ),
    ),
    Mutant(
        "stale-owner-of-a-group-stays",
        "A process that lost a slot is refused by the store and goes on serving.",
        ("F-05",),
        (f"{_CHANGES}test_a_stale_owner_changes_nothing_and_its_slot_is_given_up",),
        (Change(_CHANGER, "if outcome == Changed.STALE_OWNER.value:", "if outcome == Changed.CLOCK.value:"),),
    ),
    Mutant(
        "full-store-takes-changes",
        "Groups are made and changed in a store that needs its last memory for what it took.",
        ("F-12",),
        (f"{_CHANGES}test_a_store_above_four_fifths_of_its_memory_refuses_changes",),
        (
            Change(
                "workers/writer.py",
                "        if instance.is_full:\n            raise ResourceExhausted(",
                "        if instance.is_full and self._draining:\n            raise ResourceExhausted(",
            ),
        ),
    ),
)

_OF_READS: Final = (
    Mutant(
        "history-from-before-the-join",
        "A new member reads what was said before.",
        ("G11", "G5"),
        (f"{_READS}test_each_sees_the_own_interval_and_nothing_beside_it",),
        (Change(_DOMAIN, "if item[0] > joined_at]", "if item[0] + joined_at]"),),
    ),
    Mutant(
        "history-after-the-leaving",
        "Who left reads on.",
        ("G11", "G6", "T6"),
        (f"{_READS}test_each_sees_the_own_interval_and_nothing_beside_it",),
        (
            Change(
                _DOMAIN,
                "before = min(before_seq, left_at) if before_seq and left_at else before_seq or left_at",
                "before = before_seq if left_at >= 0 else left_at",
            ),
        ),
    ),
    Mutant(
        "head-of-who-left",
        "Who left is told how much was said since.",
        ("G11",),
        (f"{_READS}test_each_sees_the_own_interval_and_nothing_beside_it",),
        (
            Change(
                _READER,
                "rules.upper_visible(page.head_seq, left_at=interval.left_at)",
                "rules.upper_visible(page.head_seq, left_at=Seq(0))",
            ),
        ),
    ),
    Mutant(
        "interval-read-once",
        "A page is shown by the interval from before it was read: a removal in between shows too much.",
        ("G6", "G12", "F-49"),
        (
            f"{_READS}test_a_removal_while_a_page_is_read_shows_nothing_of_what_comes_after_it",
            f"{_READS}test_a_removal_while_members_are_read_refuses_the_list",
        ),
        (Change(_READER, "            if behind == interval:\n", "            if behind is not None:\n"),),
    ),
    Mutant(
        "list-for-who-is-gone",
        "Who left a group is told its members.",
        ("G12",),
        (f"{_READS}test_who_is_gone_gets_no_list",),
        (Change(_READER, "if interval.state is not MemberState.MEMBER:", "if interval.state is None:"),),
    ),
    Mutant(
        "stranger-told-that-a-group-exists",
        "Who was never in a group gets another answer than for a group that does not exist.",
        ("G11", "F-48", "T7"),
        (f"{_READS}test_a_stranger_gets_one_answer_for_every_question_and_every_group",),
        (
            Change(
                _READER,
                "        if interval is None:\n            raise PermissionDenied(",
                "        if interval is None and (await self._memberships.load_groups([place]))[0]:\n"
                '            raise PermissionDenied("not a member")\n'
                "        if interval is None:\n            raise PermissionDenied(",
            ),
        ),
    ),
    Mutant(
        "unread-of-who-left",
        "Unread counts on for who left.",
        ("S9",),
        (f"{_READS}test_a_mark_ends_with_what_is_visible_and_counts_no_events",),
        (Change(_READER, "Seq(interval.left_at - 1) if interval.left_at else None", "None"),),
    ),
    Mutant(
        "unread-from-before-the-join",
        "What was said before a user came counts as unread.",
        ("S9", "X2"),
        (
            f"{_READS}test_a_mark_ends_with_what_is_visible_and_counts_no_events",
            f"{_READS}test_behind_a_rejoin_only_what_followed_is_unread",
        ),
        (
            Change(
                _DOMAIN,
                "    return max(read_seq, joined_at)\n",
                "    return max(read_seq, Seq(0 * joined_at))\n",
            ),
        ),
    ),
    Mutant(
        "mark-without-its-upper-bound",
        "The script marks and counts beyond what who left may see.",
        ("S9", "G6"),
        ("tests/lua/test_mark_read.py::test_who_left_reads_and_counts_up_to_the_last_visible_sequence",),
        (Change("lua/mark_read.lua", "if upper ~= '' then", "if upper == '-' then"),),
    ),
)

_OF_OPERATORS: Final = (
    Mutant(
        "unknown-order-told-as-no",
        "An operator is told that nothing was done, while the members may have changed.",
        ("X11",),
        (f"{_OPERATOR}test_an_unknown_outcome_is_told_as_one_and_the_same_command_settles_it",),
        (Change("workers/operator_groups.py", "    if error.retryable:\n", "    if error.reconnect:\n"),),
    ),
    Mutant(
        "one-request-id-for-all-orders",
        "Every order without a request id has the same one: the second is taken for a repeat of the first.",
        ("X11",),
        (f"{_CTL}test_a_request_id_is_named_before_the_answer_so_that_a_lost_one_can_be_repeated",),
        (
            Change(
                "qim/ctl/cli.py", "request_id = urandom(16).hex()", "request_id = urandom(0).hex() + 32 * '0'"
            ),
        ),
    ),
)

OF_GROUP_WRITER: Final = (*_OF_SENDS, *_OF_CHANGES, *_OF_READS, *_OF_OPERATORS)
