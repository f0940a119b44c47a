"""Figures: one value a round, their median and range, and the bar that they are held against."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self


@dataclass(frozen=True)
class Bar:
    """What a figure's median must reach."""

    op: Literal["<=", ">=", "<"]
    limit: float

    def holds(self, value: float) -> bool:
        if self.op == ">=":
            return value >= self.limit
        return value < self.limit or (self.op == "<=" and value == self.limit)

    def __str__(self) -> str:
        return f"{self.op} {number(self.limit)}"


@dataclass(frozen=True)
class Figure:
    """One thing that was measured in several rounds."""

    name: str
    unit: str
    values: Sequence[float]
    bar: Bar | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def held(self) -> bool | None:
        """Whether the bar is reached; None where there is none."""
        return None if self.bar is None else self.bar.holds(self.median)

    @property
    def verdict(self) -> str:
        return {None: "", True: "ok", False: "MISSED"}[self.held]

    @classmethod
    def load(cls, fields: dict[str, Any]) -> Self:
        bar = fields["bar"]
        return cls(fields["name"], fields["unit"], fields["values"], Bar(**bar) if bar else None)


@dataclass
class Part:
    """The result of one part of the run."""

    name: str
    title: str
    figures: list[Figure] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    """What was used and by whom, round by round."""
    notes: list[str] = field(default_factory=list)
    skipped: str = ""
    """Why the part wasn't run, if it wasn't."""
    when: str = ""
    commit: str = ""
    quick: bool = False

    def add(self, name: str, unit: str, values: Sequence[float], bar: Bar | None = None) -> None:
        self.figures.append(Figure(name, unit, list(values), bar))

    def record(self, fields: dict[str, Any]) -> None:
        """Keep a round, and show that it is done."""
        self.rounds.append(fields)
        print(" ", ", ".join(f"{name} {value}" for name, value in fields.items()), flush=True)

    @property
    def background(self) -> tuple[float, float]:
        """The least and the most that others used in a round, in cores."""
        used = [each["others_cores"] for each in self.rounds if "others_cores" in each]
        return (min(used), max(used)) if used else (0.0, 0.0)

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, fields: dict[str, Any]) -> Self:
        figures = [Figure.load(each) for each in fields["figures"]]
        return cls(**{**fields, "figures": figures})


@dataclass(frozen=True)
class Options:
    """What the person asked for."""

    quick: bool = False
    """Shorter and fewer rounds, to try the benchmarks themselves."""

    def rounds(self, usual: int) -> int:
        return min(2, usual) if self.quick else usual

    def seconds(self, usual: float) -> float:
        return usual / 3 if self.quick else usual


def number(value: float) -> str:
    """Write a number with three digits that count, or all before the point."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 2 if abs(value) < 10 else 1
    text = f"{value:.{digits if abs(value) >= 0.1 else 3}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of values in order."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
