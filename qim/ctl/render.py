"""A command's dictionary as a table for people, or as JSON for programs.

The dictionary is the contract: its keys are the JSON keys, with a `schema` number. A table shows the same
values: scalars of the top level first, then one table for each list of rows, or a list of its rows where the
terminal is too narrow for the table. Control and direction characters of foreign text are escaped, so that no
text can repaint the operator's terminal. Data go to standard output; messages go to standard error.
"""

import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from rich.console import Console
from rich.table import Table

PIPE_COLUMNS: Final = 240
IDENTIFIERS: Final = frozenset({"pid", "port", "worker", "slot", "epoch", "offset", "position", "last"})
"""Numbers that are names: written without separators, so that they can be copied."""
_BYTES_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def to_json(result: Mapping[str, Any]) -> str:
    """One object, keys in the order of the command."""
    return orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode()


def show(result: Mapping[str, Any], *, console: Console) -> None:
    """Prints scalars, then lists, of a result."""
    for key, value in result.items():
        if key != "schema" and not (_is_rows(value) and value):
            for line in _lines(key, value):
                console.print(line, highlight=False, markup=False, soft_wrap=True)
    for key, value in result.items():
        if _is_rows(value) and value:
            table = _table(key, value)
            wide = console.options.update_width(PIPE_COLUMNS)
            if console.measure(table, options=wide).maximum <= console.width:
                console.print(table)
            else:
                _print_records(key, value, console)


def open_console() -> Console:
    """Standard output. A pipe has no width: a table for `grep` keeps each row on one line."""
    return Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)


def escape(text: str) -> str:
    """Control, format and private characters become escapes; everything else stays."""
    return "".join(
        character
        if unicodedata.category(character)[0] != "C"
        else character.encode("unicode_escape").decode()
        for character in text
    )


def _print_records(key: str, rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """For a narrow terminal: a value per line reads better than words cut into pieces of six letters."""
    for number, row in enumerate(rows, start=1):
        console.print(f"{_title(key)}, {number} of {len(rows)}", style="bold", highlight=False, markup=False)
        for name, value in row.items():
            for line in _lines(name, value):
                console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


def _lines(key: str, value: object) -> list[str]:
    """A fact on a line of its own; of several texts (reasons) each."""
    if isinstance(value, list) and value:
        cells = [_cell(key, item) for item in value]
    else:
        cells = ["none" if value == [] else _cell(key, value)]
    return [f"{_title(key) if not at else '':<24} {cell}" for at, cell in enumerate(cells)]


def _is_rows(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(row, Mapping) for row in value)
    )


def _table(key: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        title=_title(key), title_justify="left", title_style="bold", show_edge=False, pad_edge=False
    )
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        numeric = any(
            isinstance(row.get(name), int | float) and not isinstance(row.get(name), bool) for row in rows
        )
        table.add_column(_title(name), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(name, row.get(name)) for name in columns))
    return table


def _title(key: str) -> str:
    return key.replace("_", " ")


def _cell(key: str, value: object) -> str:
    """Units stand in the key; the cell rounds for the eye, JSON keeps the exact value."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case int() if key.endswith("_bytes"):
            return _size(value)
        case float():
            return f"{value:,.2f}"
        case int():
            return str(value) if key in IDENTIFIERS else f"{value:,}"
        case Mapping():
            return (
                "  ".join(f"{_title(str(name))} {_cell(str(name), item)}" for name, item in value.items())
                or "–"
            )
        case list() | tuple():
            return ", ".join(_cell(key, item) for item in value) or "–"
        case _:
            return escape(str(value))


def _size(count: int) -> str:
    size = float(count)
    for unit in _BYTES_UNITS[:-1]:
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_BYTES_UNITS[-1]}"
