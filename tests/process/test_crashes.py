"""Kill -9 at every named step of the message path, of workers and of the store, under load.

Each test proves that its fault struck (the failpoint's own file, or another pid than before), then judges the
run by what clients were told: nothing acknowledged is lost, doubled or renumbered, both mailboxes and
history hold each message once, a resend gets the same coordinates, and the orphan audit is clean.
"""

import json
import random
from functools import partial
from pathlib import Path

import pytest

from tests.process.load import Account, Endpoint, Load, resend_all
from tests.services.dev_server import DevServer
from tests.waiting import eventually, happens

MESSAGES: int = 60
PAIRS: int = 3

pytestmark = pytest.mark.timeout(150)


def build_load(server: DevServer, *, pairs: int = PAIRS) -> Load:
    def account() -> Account:
        user = server.new_user()
        return Account(user.user, user.token)

    endpoint = Endpoint("127.0.0.1", server.port, server.certificate)
    return Load(endpoint, [(account(), account()) for _ in range(pairs)])


async def judge(server: DevServer, load: Load) -> None:
    """The verdict from outside, then the audit of the raw keys."""
    await load.verdict()
    one, other = load.pairs[0]
    await resend_all(load.endpoint, one, other)
    await load.verdict()
    audit = server.tool("audit", "--json")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    result = json.loads(audit.stdout)
    assert result["clean"]
    assert result["walked"]["outbox_records"] >= sum(len(a.acks) for pair in load.pairs for a in pair)


def _is_replaced(server: DevServer, victim: int) -> bool:
    return victim not in server.worker_pids()


def at_hit(step: str) -> int:
    """Within the load, however quick: fan-out and mailbox take it in few batches, positions come last."""
    if step == "fanout.stored":
        return 1
    return 7 if step.startswith("writer.") else 2


@pytest.mark.shows("F-01", "F-02", "F-03", "C2", "C4", "C7", "C11", "F4", "M4", "M7", "X5")
@pytest.mark.parametrize(
    ("step", "one_step"),
    [
        ("writer.taken", True), ("writer.reserved", True), ("writer.acknowledged", True),
        ("writer.reserved", False), ("writer.appended", False), ("writer.marked", False),
        ("writer.acknowledged", False), ("fanout.planned", True), ("fanout.appended", True),
        ("fanout.stored", True), ("mailbox.taken", True), ("mailbox.finished", True),
        ("mailbox.pushed", True),
    ],
)  # fmt: skip
async def test_a_worker_killed_at_a_step_loses_and_doubles_nothing(
    step: str, one_step: bool, tmp_path: Path
) -> None:
    struck = tmp_path / "struck"
    environment = {
        "QIM__REDIS__COMMIT_IN_ONE_STEP": str(one_step).lower(),
        "QIM__TEST__FAILPOINTS": "true",
        "QIM_FAILPOINTS": f"{step}=exit@{at_hit(step)}",
        "QIM_FAILPOINTS_LOG": str(struck),
    }
    with DevServer(tmp_path, environment=environment) as server:
        load = build_load(server)
        await load.run(messages_per_user=MESSAGES)
        # The step may come with the last messages: the worker dies, and is back, a moment after the load.
        eventually(lambda: struck.exists() and struck.read_text(), what=f"{step} was reached")
        assert struck.read_text() == f"failpoint_hit {step}\n", "the fault struck twice"
        eventually(lambda: server.log().count("worker_started") > 1, what="the worker was started again")
        await judge(server, load)


@pytest.mark.shows("F-01", "C2", "C7", "M7")
@pytest.mark.parametrize("workers", [1, 2, 4])
async def test_workers_killed_again_and_again_under_load(workers: int, tmp_path: Path) -> None:
    chance = random.Random(workers)
    with DevServer(tmp_path, workers=workers) as server:
        load = build_load(server)
        for _ in range(3):
            victim = chance.choice(server.worker_pids())
            server.kill(victim)
            await load.run(messages_per_user=MESSAGES // 3)
            await happens(partial(_is_replaced, server, victim), what="another worker took over")
        server.until_ready()
        await judge(server, load)


@pytest.mark.shows("F-08", "C2", "C4", "C10")
async def test_the_store_killed_under_load_loses_nothing_acknowledged(tmp_path: Path) -> None:
    with DevServer(tmp_path) as server:
        load = build_load(server)
        for _ in range(2):
            victim = server.store_pid()
            await load.run(messages_per_user=MESSAGES // 4)
            server.kill(victim)
            await load.run(messages_per_user=MESSAGES // 4)
            assert server.store_pid() != victim, "the store was not killed"
        server.until_ready()
        await judge(server, load)


@pytest.mark.shows("F-08", "C2")
async def test_everything_killed_at_once_comes_back_with_every_acknowledged_message(tmp_path: Path) -> None:
    server = DevServer(tmp_path)
    server.start()
    load = build_load(server)
    await load.run(messages_per_user=MESSAGES // 2)
    for pid in (*server.worker_pids(), server.store_pid()):
        server.kill(pid)
    server.stop()
    with server:
        await load.run(messages_per_user=MESSAGES // 2)
        await judge(server, load)


@pytest.mark.shows("C11")
async def test_the_audit_finds_what_was_broken_on_purpose(tmp_path: Path) -> None:
    """The twin of every clean audit above: it can fail."""
    import redis

    with DevServer(tmp_path) as server:
        load = build_load(server, pairs=1)
        await load.run(messages_per_user=10)
        await load.verdict()
        assert server.tool("audit", "--json").returncode == 0
        socket = json.loads((server.folder / "dev.json").read_text())["store_socket"]
        store = redis.Redis(unix_socket_path=socket)
        (record,) = store.scan_iter(b"msgrecord:*")
        store.hdel(record, b"3")
        (fact, *_) = store.scan_iter(b"cmidown:*")
        store.delete(fact)
        (entries, *_) = store.scan_iter(b"mbox:*")
        store.zremrangebyrank(entries, 0, 0)
        audit = eventually(lambda: server.tool("audit", "--json"), what="an audit")
        assert audit.returncode == 1, audit.stderr
        found = json.loads(audit.stdout)["found"]
        assert {"gap", "record_missing", "index_orphan", "fact_missing", "entry_missing"} <= found.keys()
