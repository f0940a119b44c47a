"""What the code has, the documentation tells."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings
from starlette.routing import Route

import gateway.errors  # noqa: F401  (its errors belong to the tree)
from gateway import limits
from gateway.app import create_app
from gateway.endpoints import ENDPOINTS
from gateway.metrics import Metrics
from gateway.settings import GatewaySettings
from shared import protocol
from shared.errors import HeadraceError, tree
from shared.keys import Keys
from shared.settings import RedisSettings
from worker.engine.simulated import SimulatedSettings
from worker.metrics import WorkerMetrics
from worker.settings import WorkerSettings

DOCS = Path(__file__).parents[2] / "docs"


def _read(name: str) -> str:
    return (DOCS / name).read_text()


def _rows(text: str) -> list[list[str]]:
    """Return the cells of all rows of all tables."""
    lines = (line for line in text.splitlines() if line.startswith("| "))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# Settings

SECTIONS: dict[str, tuple[type[BaseSettings], type[BaseSettings] | None]] = {
    "Both sides": (RedisSettings, None),
    "Gateway": (GatewaySettings, RedisSettings),
    "Worker": (WorkerSettings, RedisSettings),
    "Simulated engine": (SimulatedSettings, None),
}


def _section(name: str, page: str = "configuration.md") -> dict[str, list[str]]:
    """Return the first cell without its quotes → all cells, of a section's tables."""
    found = re.search(rf"^## {name}$(.*?)(?=^#|\Z)", _read(page), re.M | re.S)
    assert found is not None, f"{page} has no section {name}"
    return {cells[0].strip("`"): cells for cells in _rows(found.group(1)) if "`" in cells[0]}


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "made at start"
    value: Any = field.default
    if hasattr(value, "get_secret_value"):
        value = value.get_secret_value()
    if value is None:
        return "unset"
    if value in ("", ()):
        return "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{','.join(value)}`"
    return f"`{value}`"


@pytest.mark.parametrize("section", SECTIONS)
def test_settings_are_documented_with_their_defaults(section: str) -> None:
    settings, base = SECTIONS[section]
    prefix = settings.model_config.get("env_prefix", "")
    own = {
        prefix + name.upper(): _default(field)
        for name, field in settings.model_fields.items()
        if base is None or name not in base.model_fields
    }
    documented = _section(section)
    assert {name: cells[1] for name, cells in documented.items()} == own
    assert [name for name, cells in documented.items() if len(cells[3]) < 8] == []


@pytest.mark.parametrize("section", SECTIONS)
def test_settings_are_documented_with_their_bounds(section: str) -> None:
    settings, _ = SECTIONS[section]
    prefix = settings.model_config.get("env_prefix", "")
    for variable, cells in _section(section).items():
        field = settings.model_fields[variable.removeprefix(prefix).lower()]
        bounds = [
            f"{sign} {getattr(one, name):,}"
            for one in field.metadata
            for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
            if getattr(one, name, None) is not None
        ]
        assert [b for b in bounds if b not in cells[2]] == [], variable


# The protocol


FUNCTIONS = [name for name, one in vars(Keys).items() if callable(one) and name[0] != "_"]


def test_no_key_is_documented_that_is_not_there() -> None:
    assert sorted(_section("Keys", "protocol.md")) == sorted(FUNCTIONS)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_keys_are_documented(function: str) -> None:
    arguments = ["x" * 32] * (getattr(Keys, function).__code__.co_argcount - 1)
    key = getattr(Keys("p"), function)(*arguments)
    shape = re.sub(r"<[^>]*>", "x+", _section("Keys", "protocol.md")[function][1].strip("`"))
    shape = shape.replace("{tag}", r"\{x+\}").replace("{registry}", r"\{registry\}")
    assert re.fullmatch(shape, key), f"{key} is documented as {shape}"


@pytest.mark.parametrize(
    "script", sorted(one.name for one in (files("shared") / "lua").iterdir() if ".lua" in one.name)
)
def test_scripts_are_documented(script: str) -> None:
    assert f"`{script.removesuffix('.lua')}`" in _read("protocol.md")


@pytest.mark.parametrize("script", ["adopt", "publish", "finish", "cancel", "beat", "hand_back"])
def test_every_verdict_of_a_script_is_documented(script: str) -> None:
    text = (files("shared") / "lua" / f"{script}.lua").read_text()
    header = " ".join(line for line in text.splitlines() if line.startswith("--"))
    verdicts = set(re.findall(r"'([a-z]+)'", header.split("->", 1)[1]))
    row = _section("Transitions", "protocol.md")[script]
    assert verdicts
    assert {v for v in verdicts if f"`{v}`" not in row[1]} == set()


def test_the_fields_of_a_job_are_documented() -> None:
    scripts = [one.read_text() for one in (files("shared") / "lua").iterdir()]
    written = set()
    for call in re.findall(r"'H(?:SET|SETNX|INCRBY)'.*?\)\n", "".join(scripts), re.S):
        written |= set(re.findall(r"'([a-z_]+)',", call))
    assert {"owner", "cancel", "strikes", "ended_by"} <= written
    text = _read("protocol.md")
    values = {"queued", "running", "done", "expired", "poisoned", "cancelled", "failed"}
    assert {name for name in written - values if f"`{name}`" not in text} == set()


def test_frames_are_documented_in_their_order() -> None:
    fields = ", ".join(protocol.Frame.__struct_fields__)
    assert f"`[{fields}]`" in _read("protocol.md")


@pytest.mark.parametrize("record", ["Job", "Usage", "WorkerRecord", "ModelRecord", "End"])
def test_records_are_documented(record: str) -> None:
    assert f"**`{record}`**" in _read("protocol.md")


# The HTTP side


def test_errors_are_documented_with_status_and_advice() -> None:
    ours = [c for c in tree(HeadraceError) if c.__module__.split(".")[0] in ("shared", "gateway")]
    rows = _section("Errors", "api.md")
    documented = {code: (cells[1], cells[2]) for code, cells in rows.items()}
    assert documented == {
        kind.code: (str(kind.status), "yes" if kind.retryable else "") for kind in ours
    }


def test_the_table_of_limits_is_the_gateways() -> None:
    documented: dict[str, tuple[set[str], str]] = {}
    for bound, cells in _section("Limits", "api.md").items():
        default = cells[2].replace(",", "").replace("256 KiB", "262144").split()[0]
        documented[bound.lower()] = (set(re.findall(r"`(\w+)`", cells[1])), default)
    for setting, _, names in limits.BOUNDS:
        assert set(names.split()) <= documented[setting][0], setting
    defaults = {name: str(GatewaySettings.model_fields[name].default) for name in documented}
    assert {name: default for name, (_, default) in documented.items()} == defaults


def test_the_table_of_endpoints_is_the_gateways() -> None:
    documented = {
        path: tuple(cells[1:4]) for path, cells in _section("Endpoints", "api.md").items()
    }
    relayed = {
        one.path: (one.kind, "yes" if one.streams else "", "form" if one.takes_form else "JSON")
        for one in ENDPOINTS
    }
    assert {path: cells for path, cells in documented.items() if path[0] == "/"} == relayed


def test_routes_are_documented() -> None:
    text = _read("api.md")
    paths = [
        re.sub(r":path\}", "}", route.path)
        for route in create_app(GatewaySettings()).routes
        if isinstance(route, Route | APIRoute)
    ]
    assert len(paths) > 15
    assert [path for path in paths if not re.search(rf"[` ]{re.escape(path)}`", text)] == []


def test_metrics_are_documented() -> None:
    registry = CollectorRegistry()
    WorkerMetrics(registry)
    there = {
        metric.name: (metric.type, metric)
        for one in (registry, Metrics().registry)
        for metric in one.collect()
    }
    documented = {
        cells[0].strip("`"): cells[1]
        for cells in _rows(_read("configuration.md"))
        if cells[0].startswith("`headrace_")
    }
    assert documented == {name: kind for name, (kind, _) in there.items()}


def test_every_link_leads_somewhere() -> None:
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_protocols_constants_are_documented() -> None:
    transitions = import_module("shared.transitions")
    text = _read("protocol.md")
    assert f"{transitions.EARLY_CANCEL_TTL_MS // 1000} s" in text
    assert f"{transitions.LANE_TTL_MS // (24 * 3600 * 1000)} days" in text
    assert f"{transitions.DEAD_LENGTH:,}" in text
