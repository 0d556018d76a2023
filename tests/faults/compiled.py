"""The two C files of this folder, compiled when a test first needs them.

Each becomes a library that a server is started with (LD_PRELOAD). Nothing compiled is kept: the result lies
in a folder of the test run. A machine without a compiler skips what needs one, and fails under `CI=true`.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.services import require_service

HERE: Final = Path(__file__).parent
COMPILER_REMEDY: Final = "apt-get install gcc libc6-dev"


def build_library(source: str, into: Path) -> Path:
    """`source` is named from this folder. Warnings are errors: the files are few and small."""
    compiler = require_service(shutil.which("cc"), name="cc", remedy=COMPILER_REMEDY)
    library = into / f"{Path(source).stem}.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-o", library, HERE / source],
        check=True, timeout=60,
    )  # fmt: skip
    return library
