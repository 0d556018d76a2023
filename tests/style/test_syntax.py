"""Files that Python does not read: shell and Lua syntax, the pinned packages, the unit files' place."""

import os
import re
import shutil
import subprocess
from importlib.metadata import distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.services import require_service
from tests.style.source_files import ROOT

LOCK = ROOT / "requirements.lock"


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
    text = LOCK.read_text()
    entries = re.split(r"\n(?=[a-z])", text.strip())
    assert all("==" in entry and "--hash=sha256:" in entry for entry in entries)
    assert "://" not in text
    assert "--index" not in text
    assert "--find-links" not in text


@pytest.mark.parametrize("version", ["3.11.0", "3.11.2", "3.12.0", "3.13.0", "3.14.0"])
def test_pinned_packages_are_complete_on_every_supported_python(version: str) -> None:
    """A lock made on one patch level can lack what another needs: Debian 12 has 3.11.2, and it did."""
    pinned = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", LOCK.read_text(), re.MULTILINE)}
    environment = {"python_full_version": version, "python_version": version.rpartition(".")[0], "extra": ""}
    missing = {
        f"{name} needs {requirement}"
        for name in pinned & {canonicalize_name(found.name) for found in distributions()}
        for requirement in map(Requirement, distribution(name).requires or [])
        if requirement.marker is None or requirement.marker.evaluate(environment)
        if canonicalize_name(requirement.name) not in pinned
    }
    assert not missing, "\n".join(sorted(missing))
