"""How a demo's worker is started: its model, its arguments (of `vllm serve`), its environment."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

MODEL_LENGTH = 2048
"""Prompt and answer on a CPU, tokens: enough to chat, small enough for 2 GiB of KV cache."""

QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "TQDM_DISABLE": "1",
}
"""A person follows the start by the launcher's lines; set one of these to see more."""


class ModelNotFound(Exception):
    """MODEL looks like a folder, and there is none."""


@dataclass(frozen=True)
class WorkerPlan:
    """What starts one worker: its arguments, its part of the environment, the name it serves."""

    arguments: tuple[str, ...]
    env: dict[str, str]
    served: str


def simulated(model: str) -> WorkerPlan:
    """An engine without a model, which answers to a model's name all the same."""
    served = model or "simulated"
    env = {"HEADRACE_ENGINE": "simulated", "HEADRACE_SIMULATED_MODELS": served}
    return WorkerPlan((), env, served)


def vllm(model: str, extra: tuple[str, ...], *, worker: int, workers: int) -> WorkerPlan:
    """The vLLM that is installed, on a Hugging Face id or a folder. `extra` has the last word."""
    folder = model_folder(model)
    served = folder.name if folder else model
    arguments = [str(folder or model), "--served-model-name", served]
    env = {"HEADRACE_ENGINE": "vllm", "VLLM_NO_USAGE_STATS": "1"}
    env |= {name: os.environ.get(name, value) for name, value in QUIET.items()}
    if folder:
        env["HF_HUB_OFFLINE"] = "1"
    if is_cpu_build():
        arguments += ["--enforce-eager", "--max-model-len", str(length_for(folder))]
        if not has_bfloat16():
            arguments += ["--dtype", "float32"]
        env["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "2")
        if workers > 1:  # each would bind its threads to the same cores
            env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    elif workers > 1:
        env |= gpu_of(worker)
        arguments += share_of_gpu(workers)
    return WorkerPlan((*arguments, *extra), env, served)


def model_folder(model: str) -> Path | None:
    """Return the model's folder, or None where the text is a Hugging Face id."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if model.startswith((".", "/", "~")):
        raise ModelNotFound(f"MODEL: there is no folder {folder}")
    return None


def length_for(folder: Path | None) -> int:
    """Return how long prompt and answer may be: what the model knows, if that is less."""
    if folder is None or not (folder / "config.json").is_file():
        return MODEL_LENGTH
    config = json.loads((folder / "config.json").read_text())
    return min(MODEL_LENGTH, int(config.get("max_position_embeddings") or MODEL_LENGTH))


def is_cpu_build() -> bool:
    """Tell whether the vLLM that is installed is the CPU's."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Tell whether the CPU computes in bfloat16; where it doesn't, float32 is twice as fast."""
    try:
        return "bf16" in cpuinfo.read_text()
    except OSError:
        return True


def gpus() -> int:
    """Count the machine's NVIDIA GPUs."""
    return len(list(Path("/dev").glob("nvidia[0-9]*"))) or 1


def gpu_of(worker: int) -> dict[str, str]:
    """Give each worker a GPU of its own, as far as there are any."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return {}
    return {"CUDA_VISIBLE_DEVICES": str(worker % gpus())}


def share_of_gpu(workers: int) -> list[str]:
    """Divide a GPU's memory between the workers that have to share it."""
    sharing = -(-workers // gpus())
    return ["--gpu-memory-utilization", f"{0.9 / sharing:.2f}"] if sharing > 1 else []
