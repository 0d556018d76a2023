"""Mutants of the edges: frames, bodies, tokens, links, the map, the guards, the pipe to the store."""

from typing import Final

from tests.mutants.model import Change, Mutant

_WIRE: Final = "tests/property/test_wire.py::"
_LIFE: Final = "tests/unit/client/test_connection_life.py::"
_PRESENCE: Final = "tests/unit/test_presence_rules.py::"
_DEFENCES: Final = "tests/unit/workers/test_gateway_defences.py::"
_VECTORS: Final = "tests/wire/test_vectors.py::"
_TOO_LONG: Final = "            if version != PROTOCOL_VERSION or flags or length > self._body_bytes_max:\n"

OF_EDGES: Final = (
    Mutant(
        "frame-length-unchecked",
        "A header that promises four gigabytes is waited for instead of refused.",
        ("F-45",),
        (
            f"{_WIRE}test_length_above_the_limit_is_refused_on_the_header_without_allocation",
            f"{_VECTORS}test_header_is_refused_with_its_code_however_it_is_cut",
        ),
        (
            Change(
                "qim/wire/frames.py",
                f"length = _unpack_header(view, at)\n{_TOO_LONG}",
                "length = _unpack_header(view, at)\n            if version != PROTOCOL_VERSION or flags:\n",
            ),
        ),
    ),
    Mutant(
        "cut-header-unchecked",
        "A length is checked only where a header comes in one piece.",
        ("F-45",),
        (f"{_VECTORS}test_header_is_refused_with_its_code_however_it_is_cut",),
        (
            Change(
                "qim/wire/frames.py",
                f"length = _unpack_header(residue)\n{_TOO_LONG}",
                "length = _unpack_header(residue)\n            if version != PROTOCOL_VERSION or flags:\n",
            ),
        ),
    ),
    Mutant(
        "body-allocated-from-its-header",
        "Memory for a body is taken when its header comes, not when its bytes do.",
        ("F-45",),
        (f"{_WIRE}test_header_that_promises_the_largest_body_costs_only_what_arrived",),
        (
            Change(
                "qim/wire/frames.py",
                "                self._wanted = stop - at\n                break\n",
                "                self._wanted = stop - at\n                self._room = bytearray(length)\n"
                "                break\n",
            ),
            Change(
                "qim/wire/frames.py",
                '("_body_bytes_max", "_failure",',
                '("_room", "_body_bytes_max", "_failure",',
            ),
        ),
    ),
    Mutant(
        "refused-splitter-goes-on",
        "Frames are read behind a broken header, where nothing has a border any more.",
        ("F-45",),
        (f"{_VECTORS}test_refused_splitter_stays_refused",),
        (
            Change(
                "qim/wire/frames.py",
                "        if self._failure is not None:\n            raise self._failure\n",
                "",
            ),
        ),
    ),
    Mutant(
        "garbage-crashes-the-reader",
        "Bytes that are no message raise something that nobody expects.",
        ("F-46",),
        (f"{_WIRE}test_garbage_body_is_decoded_or_refused",),
        (
            Change(
                "qim/wire/bodies.py",
                "        body = decode(data)\n    except UNREADABLE as error:\n",
                "        body = decode(data)\n    except msgspec.ValidationError as error:\n",
            ),
        ),
    ),
    Mutant(
        "refusal-quotes-the-body",
        "The text of a refusal repeats what the client wrote, and goes into logs with it.",
        ("F-46",),
        (f"{_WIRE}test_refusal_of_a_body_does_not_quote_it",),
        (
            Change(
                "qim/wire/bodies.py",
                "        raise _unreadable(op, error) from error\n    if op == _AUTH:",
                '        raise InvalidArgument(f"body {data!r}") from error\n    if op == _AUTH:',
            ),
        ),
    ),
    Mutant(
        "server-op-from-a-client",
        "A client may send what only a server may.",
        ("F-46",),
        (f"{_VECTORS}test_opcode_that_the_peer_may_not_send_ends_the_connection_or_is_ignored",),
        (
            Change(
                "qim/wire/connection.py",
                "                    if frame.opcode not in CLIENT_OPS:\n",
                "                    if not frame.opcode:\n",
            ),
        ),
    ),
    Mutant(
        "expired-token-accepted",
        "A token works for ever.",
        ("F-47",),
        (
            "tests/unit/test_tokens.py::test_every_refused_token_gets_the_same_answer",
            "tests/unit/workers/test_gateway.py::test_every_token_that_is_refused_gets_the_same_bytes",
        ),
        (
            Change(
                "qim/tokens.py",
                "        if identity.expires_at_ms <= self._clock.now_ms():\n",
                "        if identity.expires_at_ms <= 0:\n",
            ),
        ),
    ),
    Mutant(
        "foreign-audience-accepted",
        "A token of another service opens this one.",
        ("F-47",),
        ("tests/unit/test_tokens.py::test_every_refused_token_gets_the_same_answer",),
        (
            Change(
                "qim/tokens.py",
                '"verify_exp": False, "verify_iat"',
                '"verify_aud": False, "verify_exp": False, "verify_iat"',
            ),
        ),
    ),
    Mutant(
        "refusal-tells-what-was-wrong",
        "The answer to a token says which part of it was bad.",
        ("F-47",),
        ("tests/unit/test_tokens.py::test_every_refused_token_gets_the_same_answer",),
        (
            Change(
                "qim/tokens.py",
                "            # `from None`: the chain would carry parts of the token into a log.\n"
                "            raise Unauthenticated(REFUSED) from None\n",
                '            raise Unauthenticated(f"{REFUSED}: no such key or signature") from None\n',
            ),
        ),
    ),
    Mutant(
        "lost-link-says-no",
        "A request whose answer was lost on the way is answered as if nothing had been written.",
        ("F-30",),
        (
            "tests/unit/workers/test_link.py::test_a_request_whose_answer_is_lost_with_the_link_has_an_unknown_outcome",
        ),
        (
            Change(
                "workers/link.py",
                "import ClientError, DeadlineExceeded, RemoteProtocolError",
                "import ClientError, RemoteProtocolError, Unavailable",
            ),
            Change(
                "workers/link.py", "        error = DeadlineExceeded(\n", "        error = Unavailable(\n"
            ),
        ),
    ),
    Mutant(
        "lost-reply-says-no",
        "A command that was written when the store died counts as never done.",
        ("F-08",),
        (
            "tests/unit/adapters/test_redis_pipe.py::test_a_lost_line_fails_what_was_sent_as_unknown_and_the_pipe_comes_back",
        ),
        (
            Change(
                "qim/adapters/redis_pipe.py",
                "            on_reply(StoreUnknown(reason) if at < written else StoreRefused(reason))",
                "            on_reply(StoreRefused(reason) if at < written else StoreRefused(reason))",
            ),
        ),
    ),
    Mutant(
        "store-never-met-again",
        "After the store was killed nobody connects to it again.",
        ("F-08", "F-28"),
        (
            "tests/unit/adapters/test_redis_pipe.py::test_a_killed_server_is_met_again_with_its_data",
            "tests/faults/test_rows_store.py::test_a_store_connection_that_is_reset_leaves_nothing_half",
        ),
        (
            Change(
                "qim/adapters/redis_pipe.py",
                "            if not self._is_closed:\n                self._reconnecting",
                "            if self._is_closed:\n                self._reconnecting",
            ),
        ),
    ),
    Mutant(
        "everysec-accepted",
        "A store that keeps acknowledged writes in memory for two seconds is used without a word.",
        ("C10", "F-09", "X8"),
        (
            "tests/unit/test_guard_rules.py::test_each_setting_is_named_with_found_wanted_and_remedy",
            "tests/rows/test_start_guards.py::test_each_guard_of_a_store_refuses_the_start[appendfsync]",
        ),
        (
            Change(
                "qim/domain/guards.py",
                "        if value == wanted:\n",
                '        if value == wanted or setting == "appendfsync":\n',
            ),
        ),
    ),
    Mutant(
        "buckets-over-many-slots",
        "The buckets of a slot are not those that map to it, so a commit may be written by two owners.",
        ("C8",),
        ("tests/unit/test_placement.py::test_buckets_and_slots_nest_without_remainder",),
        (
            Change(
                "qim/domain/placement.py",
                "    return SlotId(bucket // BUCKETS_PER_SLOT)\n",
                "    return SlotId(bucket % SLOTS)\n",
            ),
        ),
    ),
    Mutant(
        "slow-reader-kept",
        "A client that does not read fills the memory of its worker.",
        ("F-40",),
        ("tests/unit/test_gateway_rules.py::test_a_peer_is_slow_above_its_bounds_and_not_at_them",),
        (
            Change(
                "qim/domain/gateway.py",
                "unsent_bytes > bounds.unsent_bytes_max or unanswered",
                "unsent_bytes < 0 or unanswered",
            ),
        ),
    ),
    Mutant(
        "one-bucket-for-all-users",
        "A user who floods uses up what the others may send.",
        ("F-41",),
        ("tests/unit/test_gateway_rules.py::test_one_user_at_the_limit_leaves_another_alone",),
        (
            Change(
                "qim/domain/gateway.py",
                "self._of_user.bucket((tenant, user), now_seconds)",
                "self._of_user.bucket((tenant, UserId(bytes(16))), now_seconds)",
            ),
        ),
    ),
    Mutant(
        "silent-connection-kept",
        "A connection whose peer has gone stays open for ever.",
        ("F-42", "O13"),
        (f"{_DEFENCES}test_a_silent_connection_is_dead_and_a_pinging_one_lives",),
        (
            Change(
                "qim/domain/gateway.py",
                "first = min(silent_at, frame_at, times.token_ends_at)",
                "first = min(frame_at, times.token_ends_at)",
            ),
        ),
    ),
    Mutant(
        "late-end-removes-the-new-session",
        "The late end of a dead connection takes the session of the same device with it that came since.",
        ("F-42", "O13"),
        (f"{_PRESENCE}test_the_late_end_of_an_old_session_does_not_remove_the_new_one",),
        (
            Change(
                "qim/domain/presence.py",
                "            if session.session == session_id:\n",
                "            if session.session != bytes(16):\n",
            ),
        ),
    ),
    Mutant(
        "repetition-throws-out-a-log-in",
        "A dead connection that is announced again, at a gateway whose clock is ahead, ends the living one.",
        ("O13",),
        (f"{_PRESENCE}test_what_is_announced_again_does_not_throw_out_a_log_in_whatever_the_clocks_say",),
        (
            Change(
                "qim/domain/presence.py",
                "            if user.again is None or session.device not in user.again:\n",
                "            if False:\n",
            ),
        ),
    ),
    Mutant(
        "ended-for-good-on-the-word-of-a-clock",
        "A client is told for good that it was replaced, by a log-in that may be the earlier one.",
        ("O13",),
        (f"{_PRESENCE}test_a_log_in_whose_order_is_not_sure_ends_nobody_for_good",),
        (
            Change(
                "qim/domain/presence.py",
                "    return _login_ms(arrived) > _login_ms(before)\n",
                "    return True\n",
            ),
        ),
    ),
    Mutant(
        "sessions-dated-by-their-gateway",
        "An AUTH that lay unread counts as later than the living session, which is ended for good.",
        ("O13",),
        ("tests/unit/workers/test_gateway.py::test_a_session_is_dated_by_its_device_or_else_by_its_gateway",),
        (
            Change(
                "workers/login.py",
                "        time = device_time or self._clock.now_ms()\n",
                "        time = self._clock.now_ms()\n",
            ),
        ),
    ),
    Mutant(
        "log-in-times-follow-the-clock",
        "A device whose clock was set back tells its next log-in an earlier time than its last.",
        ("O13",),
        (f"{_LIFE}test_every_log_in_of_a_device_tells_a_later_time_than_the_one_before",),
        (
            Change(
                "qim/client/steps.py",
                "max(now_ms, last + 1 if is_possible else 0)",
                "now_ms",
            ),
        ),
    ),
    Mutant(
        "goodbye-unread",
        "A client that is at its disk when it is replaced does not hear it, and ends its successor.",
        ("O13",),
        (f"{_LIFE}test_who_is_replaced_hears_it_also_while_the_disk_is_slow_or_full",),
        (Change("qim/client/transport.py", "self.goodbye or failure", "failure"),),
    ),
    Mutant(
        "log-in-time-lost-with-the-file",
        "A mended store begins its log-in times anew, behind a clock that was set back.",
        ("O13",),
        ("tests/unit/client/test_store.py::test_the_time_of_the_last_log_in_survives_damage",),
        (
            Change(
                "qim/client/schema.py",
                "login = found[0] if found and isinstance(found[0], int) else 0",
                "login = 0",
            ),
        ),
    ),
    Mutant(
        "handshake-without-end",
        "A peer that begins a handshake and says no more is kept for a minute.",
        ("F-43",),
        (f"{_DEFENCES}test_peers_that_never_finish_their_handshake_are_cut_and_others_are_served",),
        (
            Change(
                "workers/gateway.py",
                "ssl_handshake_timeout=handshake_timeout_ms / 1000,",
                "ssl_handshake_timeout=60.0,",
            ),
        ),
    ),
    Mutant(
        "trickled-frame-kept",
        "A peer that sends a byte a second holds its connection for ever.",
        ("F-44",),
        (f"{_DEFENCES}test_a_trickled_frame_ends_the_connection",),
        (
            Change(
                "qim/domain/gateway.py",
                "first = min(silent_at, frame_at, times.token_ends_at)",
                "first = min(silent_at, times.token_ends_at)",
            ),
        ),
    ),
    Mutant(
        "full-disk-ends-the-service",
        "A log line that cannot be written ends the worker.",
        ("F-36",),
        ("tests/unit/test_logsetup.py::test_a_full_disk_costs_lines_and_not_the_service",),
        (
            Change(
                "qim/logsetup.py",
                "            written = os.write(self._descriptor, data)\n        except OSError:\n",
                "            written = os.write(self._descriptor, data)\n        except BlockingIOError:\n",
            ),
        ),
    ),
    Mutant(
        "crash-loop-without-pause",
        "A child that crashes at every start is started again at once, for ever.",
        ("F-07",),
        ("tests/process/test_supervisor.py::test_a_crash_loop_backs_off_while_the_other_child_works",),
        (
            Change(
                "qim/domain/supervisor.py",
                "        step = last if fate is Fate.FENCED else min(self._attempt, last)\n",
                "        step = last if fate is Fate.FENCED else 0\n",
            ),
        ),
    ),
)
