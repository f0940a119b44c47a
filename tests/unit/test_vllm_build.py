"""What is checked and set before vLLM is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from worker.engine import vllm_build
from worker.engine.interface import EngineStartError


@pytest.mark.parametrize("version", ["0.24.0", "0.32.0+cpu", "0.33.1rc2.dev7+gabc"])
def test_versions_within_the_tested_range_are_taken(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    assert vllm_build.check_version() == version


@pytest.mark.parametrize("version", ["0.23.9", "0.34.0", "1.0.0", "dev"])
def test_other_versions_stop_the_start_and_are_named(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    with pytest.raises(EngineStartError, match=version):
        vllm_build.check_version()


def test_a_missing_vllm_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineStartError, match="can't be imported"):
        vllm_build.check_version()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment that the test may change, without what vLLM reads."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "HF_"))}
    monkeypatch.setattr(os, "environ", clean)
    return clean


def test_a_local_model_needs_no_hub(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    vllm_build.prepare_environment([str(tmp_path), "--max-model-len", "64"])
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"


def test_a_model_from_the_hub_is_fetched(environment: dict[str, str]) -> None:
    vllm_build.prepare_environment(["org/model"])
    assert "HF_HUB_OFFLINE" not in environment


def test_what_the_user_has_set_stays(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    environment |= {"HF_HUB_OFFLINE": "0", "VLLM_NO_USAGE_STATS": "0"}
    vllm_build.prepare_environment(["--model", str(tmp_path)])
    assert environment["HF_HUB_OFFLINE"] == "0"
    assert environment["VLLM_NO_USAGE_STATS"] == "0"


def test_the_workers_own_calls_are_not_refused(environment: dict[str, str]) -> None:
    environment["VLLM_API_KEY"] = "secret"
    vllm_build.prepare_environment(["org/model"])
    assert "VLLM_API_KEY" not in environment
