"""The test support is tested too: the table of proved ids, the waiting helpers and the store servers.

A table that calls an unproved id proved, or a fixture that silently skips in CI, would hollow out every other
test.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests import ids_table
from tests.services import StoreServer, require_service
from tests.waiting import eventually, eventually_async, happens, stays

pytest_plugins = ["pytester"]


def test_an_id_is_proved_by_one_passing_test_and_refuted_by_one_failing() -> None:
    assert ids_table.judge(["passed", "skipped"]) == ids_table.PROVED
    assert ids_table.judge(["passed", "failed"]) == ids_table.FAILED
    assert ids_table.judge(["skipped"]) == ids_table.UNPROVED
    assert ids_table.judge([]) == ids_table.UNPROVED


def test_ids_are_sorted_by_number_and_fault_rows_stand_apart_from_fanout_rules() -> None:
    assert sorted(["C10", "F-02", "C2", "F1", "F-45"], key=ids_table.sort_key) == [
        "C2",
        "C10",
        "F1",
        "F-02",
        "F-45",
    ]


def test_rows_name_each_required_id_once_and_prove_none_that_no_mutant_breaks() -> None:
    tests = {"C1": ["a.py::test_x[1]", "a.py::test_x[2]"], "C2": ["a.py::test_y"], "C3": ["a.py::test_y"]}
    outcomes: dict[str, ids_table.Outcome] = {"a.py::test_x[1]": "passed", "a.py::test_y": "passed"}
    rows = ids_table.build_rows(
        tests, outcomes, mutants={"C1": ["one", "two"]}, without_mutant={"C1": "unused", "C3": "a reason"}
    )
    by_id = {row.proof_id: row for row in rows}
    assert by_id["C1"] == ("C1", ("test_x",), ("one", "two"), "passed")
    assert by_id["C2"] == ("C2", ("test_y",), (), "unproved")
    assert by_id["C3"] == ("C3", ("test_y",), ("none: a reason",), "passed")
    assert by_id["F-47"] == ("F-47", (), (), "unproved")
    assert len(rows) == len(by_id) == len(ids_table.REQUIRED_IDS)


def _session(pytester: pytest.Pytester, body: str, *arguments: str) -> pytest.RunResult:
    root = Path(__file__).parents[2]
    pytester.makeini(f"[pytest]\npythonpath = {root}\nasyncio_mode = auto\nmarkers = shows(*ids): x\n")
    pytester.makeconftest("from tests.conftest import *  # noqa: F403\n")
    pytester.makepyfile(body)
    return pytester.runpytest_subprocess("-p", "no:locust", "-p", "no:valkey", *arguments)


def test_an_unproved_id_fails_the_run_only_when_ids_are_required(pytester: pytest.Pytester) -> None:
    body = "import pytest\n@pytest.mark.shows('C1')\ndef test_one(): pass\n"
    relaxed = _session(pytester, body)
    assert relaxed.ret == 0
    relaxed.stdout.fnmatch_lines(["C1 *| test_one | *"])
    strict = _session(pytester, body, "--ids-required")
    assert strict.ret == 1
    strict.stdout.fnmatch_lines(["C2 *| - | * | unproved", "unproved and required:*"])


def test_a_callback_that_raises_fails_the_test(pytester: pytest.Pytester) -> None:
    body = """
        import asyncio
        async def test_one():
            asyncio.get_running_loop().call_soon(lambda: 1 / 0)
            await asyncio.sleep(0)
    """
    result = _session(pytester, body)
    result.stdout.fnmatch_lines(["*a callback raised in the event loop*ZeroDivisionError*"])
    assert result.ret == 1


def test_a_missing_service_skips_locally_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such is not installed: install it"):
        require_service(None, name="no-such", remedy="install it")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no-such is not installed: install it"):
        require_service(None, name="no-such", remedy="install it")
    assert require_service("/bin/sh", name="sh", remedy="") == "/bin/sh"


def test_waiting_returns_the_answer_and_names_what_did_not_happen() -> None:
    answers: Iterator[int] = iter([0, 0, 7])
    assert eventually(lambda: next(answers), what="seven") == 7
    with pytest.raises(AssertionError, match=r"not within 0\.02 s: never"):
        eventually(lambda: False, what="never", timeout_seconds=0.02)


async def test_waiting_in_a_loop_accepts_coroutines_and_notices_a_change() -> None:
    async def answer() -> str:
        return "yes"

    assert await eventually_async(answer, what="an answer") == "yes"
    assert await happens(lambda: "yes", what="an answer") == "yes"
    flags = {"up": True}
    asyncio.get_running_loop().call_later(0.02, flags.update, {"up": False})
    with pytest.raises(AssertionError, match="did not stay true"):
        await stays(lambda: flags["up"], what="the flag is up", period_seconds=5.0)


def test_store_server_keeps_an_answered_write_through_kill_and_restart(fresh_valkey: StoreServer) -> None:
    with redis.Redis.from_url(fresh_valkey.url) as client:
        client.set("answered", "yes")
    first_pid = fresh_valkey.pid
    fresh_valkey.kill9()
    assert not fresh_valkey.is_running()
    fresh_valkey.restart()
    assert fresh_valkey.pid != first_pid
    assert (fresh_valkey.starts, fresh_valkey.kills) == (2, 1)
    with redis.Redis.from_url(fresh_valkey.url) as client:
        assert client.get("answered") == b"yes"
        assert client.config_get("appendfsync") == {"appendfsync": "always"}


def test_store_server_reports_why_it_did_not_start(valkey_binary: str, tmp_path: Path) -> None:
    server = StoreServer(valkey_binary, tmp_path / "bad", settings={"no-such-setting": "1"})
    with pytest.raises(AssertionError, match="no-such-setting"):
        server.start()
    server.close()


def test_both_servers_answer(store_server: StoreServer) -> None:
    with redis.Redis.from_url(store_server.url) as client:
        assert client.ping()
