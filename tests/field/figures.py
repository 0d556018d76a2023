"""The figures of one case: noted while it runs, printed as a table and kept in its report at the end."""

import sys
from collections.abc import Callable, Iterator

import pytest


class Figures:
    """What was used and what was found, in the order in which it was noted."""

    def __init__(self, name: str, record: Callable[[str, object], None]) -> None:
        self._name = name
        self._record = record
        self._rows: list[tuple[str, str]] = []

    def note(self, what: str, value: object) -> None:
        """One line of the table; a fraction is shown with three digits behind the point."""
        text = f"{value:.3f}" if isinstance(value, float) else str(value)
        self._rows.append((what, text))
        self._record(what, text)

    def table(self) -> str:
        width = max((len(what) for what, _ in self._rows), default=0)
        lines = [f"  {what:<{width}}  {text}" for what, text in self._rows]
        return "\n".join([f"\n{self._name}", *lines])


@pytest.fixture
def figures(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Iterator[Figures]:
    """Printed also when the case fails: then the figures matter most."""
    noted = Figures(request.node.name, record_property)
    yield noted
    sys.stdout.write(noted.table() + "\n")
