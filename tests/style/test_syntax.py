"""Files that Python does not read: shell and Lua syntax, the pinned packages, the unit files' place."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.services import require_service
from tests.style.source_files import ROOT


def test_shell_scripts_parse() -> None:
    result = subprocess.run(
        ["bash", "-n", str(ROOT / ".ci/run")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_lua_scripts_parse() -> None:
    found = shutil.which("luac5.1") or shutil.which("luac")
    luac = require_service(found, name="luac", remedy="apt-get install lua5.1")
    scripts = sorted(str(path) for path in (ROOT / "lua").rglob("*.lua"))
    result = subprocess.run([luac, "-p", *scripts], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "lua").rglob("*.lua")), ids=lambda path: path.name)
def test_each_script_opens_with_what_it_does(path: Path) -> None:
    first, second = path.read_text().splitlines()[:2]
    opening = second if first.startswith("#!lua") else first
    assert opening.startswith("-- "), f"{path.name} does not say what it does"


def test_every_pinned_package_has_a_version_and_hashes_and_no_address() -> None:
    text = (ROOT / "requirements.lock").read_text()
    entries = re.split(r"\n(?=[a-z])", text.strip())
    assert all("==" in entry and "--hash=sha256:" in entry for entry in entries)
    assert "://" not in text
    assert "--index" not in text
    assert "--find-links" not in text
