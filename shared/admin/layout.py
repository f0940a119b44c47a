"""Columns, facts and units for people."""

from __future__ import annotations

import time
from collections.abc import Sequence

Cell = str | int | float | None


def table(headings: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return aligned columns, numbers to the right; `none` where there are no rows."""
    if not rows:
        return "none\n"
    texts = [[_text(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headings, *texts, strict=True)]
    right = [any(isinstance(cell, int) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in [[heading.upper() for heading in headings], *texts]:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip() + "\n")
    return "".join(lines)


def facts(pairs: Sequence[tuple[str, Cell]]) -> str:
    """Return one line per fact that is known."""
    width = max(len(name) for name, _ in pairs)
    return "".join(
        f"{name.ljust(width)}  {_text(fact)}\n" for name, fact in pairs if fact is not None
    )


def heading(text: str) -> str:
    return f"\n{text}\n"


def duration(seconds: float | None) -> str | None:
    """Return `0.4s`, `12s`, `3m05s`, `2h10m` or `4d03h`."""
    if seconds is None:
        return None
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    for size, unit, below, small in ((86_400, "d", 3600, "h"), (3600, "h", 60, "m")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // below:02d}{small}"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def moment(at: float | None) -> str | None:
    """Return a time, in UTC."""
    if at is None:
        return None
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)) + f".{int(at * 1000) % 1000:03d}Z"


def size(count: int) -> str:
    """Return `512 B`, `1.5 KiB` or larger."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def clean(text: str) -> str:
    """Return a text without what would move a terminal's cursor: some come from clients."""
    return "".join(one if one.isprintable() else "?" for one in text)


def _text(cell: Cell) -> str:
    if cell is None or cell == "":
        return "-"
    return clean(str(cell))
