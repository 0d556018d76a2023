"""ARCHITECTURE.md leads through the code: every file that it names exists, and every file beside the layout
has its reason there.
"""

import re
from typing import Final

import pytest

from tests.style.source_files import ROOT

NAMED = re.compile(r"`([\w/]+\.(?:py|lua))`")
FOLDERS: Final = ("qim", "workers", "lua", "loadtest")
LAYOUT: Final = """
errors.py limits.py ids.py clock.py config.py metrics.py logsetup.py records.py ports.py layout.py
frames.py bodies.py connection.py placement.py supervisor.py gateway.py presence.py writer.py
fanout.py mailbox.py commitlog_redis.py commitlog_memory.py commits_redis.py commits_memory.py
mailbox_redis.py mailbox_memory.py redis_pipe.py lua_scripts.py sync.py store.py transport.py
client.py protocol.py commands.py render.py tune.py cli.py __main__.py __init__.py heartbeat.py
notify.py control.py worker.py wiring.py link.py admin.py locustfile.py user.py capacity.py report.py
claim_slot.lua reserve_messages.lua mark_committed.lua read_pending.lua read_history.lua
mark_read.lua materialise_dispatches.lua begin_dispatch.lua append_entries.lua finish_dispatch.lua
read_mailbox.lua append_log.lua trim_log.lua store_position.lua
"""
"""What the house style's layout names; everything else needs its reason in ARCHITECTURE.md."""


def files_named(text: str) -> set[str]:
    return set(NAMED.findall(text))


def files_missing(named: set[str], present: set[str]) -> list[str]:
    return sorted(name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in present))


@pytest.fixture(scope="module")
def present() -> set[str]:
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in found if path.suffix in {".py", ".lua"}}


@pytest.fixture(scope="module")
def named() -> set[str]:
    return files_named((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))


def test_every_file_that_is_named_exists(named: set[str], present: set[str]) -> None:
    assert files_missing(named, present) == []


def test_every_file_beside_the_layout_has_its_reason(named: set[str], present: set[str]) -> None:
    told = {name.rpartition("/")[2] for name in named} | set(LAYOUT.split())
    assert sorted(path for path in present if path.rpartition("/")[2] not in told) == []


def test_a_file_that_is_gone_is_seen() -> None:
    assert files_missing(files_named("see `workers/gone.py` and `link.py`"), {"workers/link.py"}) == [
        "workers/gone.py"
    ]
