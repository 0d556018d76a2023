"""`qim` with its guards on a store's settings switched off: for tests that show what the guards prevent.

Run as `python -m tests.faults.unguarded dev …`. Nothing in the product can do this: the two places that ask
for the settings are replaced here, in the launcher and, because the launcher starts the server as a program
of its own, in that one too. Identity and role are still asked for.
"""

import sys
from collections.abc import Sequence
from typing import Any, Final

import workers.dev
import workers.init
import workers.wiring
from workers.__main__ import main
from workers.child import start_program

MODULE: Final = "tests.faults.unguarded"
PRODUCT: Final = "workers"


def _accept_any_settings(facts: object, *, where: str) -> None:
    """In place of the guard."""
    sys.stderr.write(f"the settings of {where} are not looked at\n")


def _start_unguarded(command: Sequence[str], **options: Any) -> Any:
    return start_program([MODULE if word == PRODUCT else word for word in command], **options)


if __name__ == "__main__":
    workers.init.check_settings = _accept_any_settings  # type: ignore[attr-defined]  # imported by name there
    workers.wiring.check_settings = _accept_any_settings  # type: ignore[attr-defined]  # the same
    workers.dev.start_program = _start_unguarded  # type: ignore[attr-defined]  # the same
    main()
