"""Tables of plain text of fixed width, the same wherever they are printed."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table

#: Columns of a report.
WIDTH = 100


def rendered(sections: Iterable[tuple[str, RenderableType]], width: int = WIDTH) -> str:
    """Sections with their titles (or none) below each other, ``width`` columns wide, in plain text without colours."""
    shown = [
        Group(title, Padding(body, (0, 0, 1, 2))) if title else Padding(body, (0, 0, 1, 0)) for title, body in sections
    ]
    output = io.StringIO()
    console = Console(
        file=output,
        width=width,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
    console.print(Group(*shown))
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines()).rstrip()


def table(rows: Iterable[Sequence[str]], header: Sequence[str] = (), right: Sequence[int] = ()) -> Table:
    """Columns without lines; those numbered in ``right`` hold numbers. Text that is too long goes on below."""
    listed = list(rows)
    made = Table(box=None, show_header=bool(header), pad_edge=False, padding=(0, 2, 0, 0))
    for i in range(len(listed[0]) if listed else len(header)):
        numeric = i in right
        made.add_column(
            header[i] if header else "", justify="right" if numeric else "left", overflow="fold", no_wrap=numeric
        )
    for row in listed:
        made.add_row(*row)
    return made
