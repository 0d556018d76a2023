"""The script loader, and the house rules that each script file must keep."""

import hashlib
import re
from pathlib import Path

import pytest

from qim.adapters.lua_scripts import LuaScripts
from qim.errors import ConfigError

SCRIPTS = LuaScripts.load()
REFUSED_WHEN_FULL = {"reserve_messages", "commit_messages", "create_group", "change_membership"}
"""The scripts that take something new in; every other one must still run on a full server."""


def test_a_script_is_named_by_the_digest_of_its_exact_bytes(tmp_path: Path) -> None:
    (tmp_path / "one.lua").write_bytes(b"#!lua\nreturn 1\n")
    scripts = LuaScripts.load(tmp_path)
    assert scripts.names == ("one",)
    assert scripts.sha("one") == hashlib.sha1(b"#!lua\nreturn 1\n").hexdigest().encode()
    assert scripts.text("one") == b"#!lua\nreturn 1\n"


def test_an_installation_without_scripts_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        LuaScripts.load(tmp_path)


@pytest.mark.parametrize("name", SCRIPTS.names)
def test_every_script_says_what_it_does_before_it_does_it(name: str) -> None:
    assert SCRIPTS.text(name).decode().splitlines()[1].startswith("-- ")


@pytest.mark.parametrize("name", SCRIPTS.names)
def test_only_what_takes_something_new_in_is_refused_by_a_full_server(name: str) -> None:
    first = SCRIPTS.text(name).decode().splitlines()[0]
    runs_when_full = "allow-oom" in first or "no-writes" in first
    assert first.startswith("#!lua")
    assert runs_when_full == (name not in REFUSED_WHEN_FULL)


@pytest.mark.parametrize("name", SCRIPTS.names)
def test_no_script_builds_a_key(name: str) -> None:
    """A key that a script makes up is invisible to whoever moves a bucket to another instance."""
    text = SCRIPTS.text(name).decode()
    assert not re.search(r"call\(\s*'(?!XINFO)[A-Z]+',\s*['\"]", text), "a literal stands where a key belongs"
    assert "{b" not in text
    assert "{s" not in text
