"""Tables that commands print. With `coordinator.progress`, the only door to rich."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH: Final = 160  # of what is not a terminal


@dataclass(frozen=True, slots=True)
class Column:
    heading: str
    numeric: bool = False


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Write a table to standard output; long cells are folded, nothing is cut off."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(
            column.heading, justify="right" if column.numeric else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    console.print(table)
