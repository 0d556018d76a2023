"""Copies of the project that may be broken.

A base copy is made once; the control run in it also leaves compiled files there, so that a copy of the base
starts at once. Ages of files are kept, because a compiled file is believed by the age of its source.
"""

import shutil
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_LEFT_BEHIND: Final = frozenset({"build", "dist", "node_modules"})


def _ignored(folder: str, names: list[str]) -> list[str]:
    """What a build, a run or an editor left, and the environment with its packages."""
    is_top = Path(folder) == ROOT
    return [name for name in names if name.startswith(".") or (is_top and name in _LEFT_BEHIND)]


def copy_project(target: Path) -> Path:
    """The project as it lies here, changes included."""
    shutil.copytree(ROOT, target, ignore=_ignored, symlinks=True)
    return target


def copy_tree(base: Path, target: Path) -> Path:
    """One copy more of a copy."""
    shutil.copytree(base, target, ignore=lambda _folder, names: [n for n in names if n.startswith(".")])
    return target
