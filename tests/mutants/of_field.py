"""Mutants of what the field cases ask for: scope of identities, content, the client of the store, the local
store. Each is shown by the test of its case.
"""

from typing import Final

from tests.mutants.model import Change, Mutant

_SCOPE: Final = "tests/field/test_identity_scope.py::"
_CONTENT: Final = "tests/field/test_content.py::"
_PIPE_CASES: Final = "tests/field/test_store_client.py::"
_STORE_CASES: Final = "tests/field/test_store_pressure.py::"
_PIPE: Final = "qim/adapters/redis_pipe.py"

OF_FIELD: Final = (
    Mutant(
        "identity-scope-without-the-sender",
        "Two users of a conversation who draw the same id are taken for one, and the second is refused.",
        ("O03",),
        (f"{_SCOPE}test_the_same_id_elsewhere_or_of_somebody_else_is_another_message",),
        (
            Change(
                "qim/adapters/redis_keys.py",
                "BUCKET_TAGS[key.bucket], _TENANT.pack(key.tenant), key.conversation, key.sender,\n",
                "BUCKET_TAGS[key.bucket], _TENANT.pack(key.tenant), key.conversation, bytes(16),\n",
            ),
        ),
    ),
    Mutant(
        "everybody-back-at-once",
        "Clients that were told to come back later all come at the same moment.",
        ("O15",),
        ("tests/unit/client/test_sync.py::test_the_hint_of_the_server_is_the_least_and_is_spread",),
        (
            Change(
                "qim/client/sync.py",
                "            return hint_ms / 1000 + jitter * max(hint_ms / 1000, spread)\n",
                "            return hint_ms / 1000 + 0 * spread\n",
            ),
        ),
    ),
    Mutant(
        "text-trimmed",
        "What stands at the end of a text and cannot be seen is cut off.",
        ("O18",),
        (f"{_CONTENT}test_every_text_is_the_same_bytes_on_every_path",),
        (
            Change(
                "qim/domain/writer.py",
                "ClientMessageId(client_message_id), message_type, custom_type, body, retention_class,\n",
                "ClientMessageId(client_message_id), message_type, custom_type, body.rstrip(),\n"
                "        retention_class,\n",
            ),
        ),
    ),
    Mutant(
        "bodies-in-the-log",
        "What users write to each other stands in the log of the service.",
        ("O18", "T14"),
        (f"{_CONTENT}test_nothing_of_a_message_is_in_a_log_and_no_control_character",),
        (
            Change(
                "workers/writer.py",
                "                    sends.append((request, _plan_send(request, now_ms, self._versions)))\n",
                '                    log.warning("planned", text=repr(bytes(request.body)))\n'
                "                    sends.append((request, _plan_send(request, now_ms, self._versions)))\n",
            ),
        ),
    ),
    Mutant(
        "late-answer-for-the-next-caller",
        "A call whose time is over gives up its place, and those behind it get the answers of others.",
        ("O21",),
        (f"{_PIPE_CASES}test_no_answer_ever_reaches_another_caller[130-commands]",),
        (
            Change(
                _PIPE,
                '            self.close("no answer within the time limit")\n'
                "        else:\n            self._sweep_timer",
                '            self._waiting.popleft()[1](StoreUnknown("no answer within the time limit"))\n'
                "        if self._transport:\n            self._sweep_timer",
            ),
        ),
    ),
    Mutant(
        "forgotten-script-fails-its-caller",
        "A script that the store has forgotten is an error for everybody until the next connection.",
        ("O21", "O22"),
        (
            f"{_PIPE_CASES}test_a_script_forgotten_in_the_middle_of_a_pipeline_runs_once_and_its_neighbours_too",
        ),
        (
            Change(
                _PIPE,
                'if type(reply) is StoreRefused and str(reply).startswith("NOSCRIPT"):',
                'if type(reply) is StoreRefused and str(reply).startswith("NOSCRIPTS"):',
            ),
        ),
    ),
    Mutant(
        "damaged-store-kept",
        "A local store that is damaged is opened as it is, so the client never starts again.",
        ("O26",),
        (f"{_STORE_CASES}test_a_damaged_store_is_set_aside_and_filled_again_by_the_server[cut_short]",),
        (
            Change(
                "qim/client/schema.py",
                "        if is_damage(error):\n            return False\n        raise\n",
                "        if is_damage(error):\n            return True\n        raise\n",
            ),
        ),
    ),
    Mutant(
        "retention-unchecked",
        "A service starts with retentions under which a replay delivers twice or a cursor meets a hole.",
        ("X8",),
        ("tests/rows/test_start_guards.py::test_each_inequality_of_retention_refuses_the_start",),
        (Change("qim/domain/guards.py", "if getattr(kept, name) < wanted", "if getattr(kept, name) < 0"),),
    ),
)
