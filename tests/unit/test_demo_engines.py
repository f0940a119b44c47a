"""How the demo starts its workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compose import engines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "Tiny-Instruct"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    return model


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "is_cpu_build", lambda: True)
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "is_cpu_build", lambda: False)
    monkeypatch.setattr(engines, "gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_simulated_engine_answers_to_the_models_name() -> None:
    plan = engines.simulated("my/model")
    assert plan.served == "my/model"
    assert plan.env == {
        "HEADRACE_ENGINE": "simulated",
        "HEADRACE_SIMULATED_MODELS": "my/model",
    }


@pytest.mark.usefixtures("cpu")
def test_folder_on_a_cpu_asks_no_hub_and_keeps_to_the_models_length(folder: Path) -> None:
    plan = engines.vllm(str(folder), (), worker=0, workers=1)
    assert plan.served == "Tiny-Instruct"
    precision = () if engines.has_bfloat16() else ("--dtype", "float32")
    assert plan.arguments == (
        *(str(folder), "--served-model-name", "Tiny-Instruct"),
        *("--enforce-eager", "--max-model-len", "512"),
        *precision,
    )
    assert plan.env["HF_HUB_OFFLINE"] == "1"
    assert plan.env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in plan.env


def test_a_cpu_without_bfloat16_is_known_by_its_flags(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : avx2 avx512f")
    assert not engines.has_bfloat16(cpuinfo)
    cpuinfo.write_text("flags : avx2 avx512f avx512_bf16")
    assert engines.has_bfloat16(cpuinfo)
    assert engines.has_bfloat16(tmp_path / "none")


@pytest.mark.usefixtures("cpu")
def test_hub_id_goes_to_vllm_as_it_is() -> None:
    plan = engines.vllm("org/name", ("--max-model-len", "99"), worker=0, workers=2)
    assert plan.served == "org/name"
    assert plan.arguments[0] == "org/name"
    at = plan.arguments.index("--max-model-len")
    assert plan.arguments[at + 1] == "2048"
    assert plan.arguments[-2:] == ("--max-model-len", "99")
    assert "HF_HUB_OFFLINE" not in plan.env
    assert plan.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


@pytest.mark.usefixtures("two_gpus")
def test_each_worker_has_a_gpu_of_its_own_as_far_as_there_are_any(folder: Path) -> None:
    plans = [engines.vllm(str(folder), (), worker=i, workers=3) for i in range(3)]
    assert [plan.env["CUDA_VISIBLE_DEVICES"] for plan in plans] == ["0", "1", "0"]
    assert all(plan.arguments[-2:] == ("--gpu-memory-utilization", "0.45") for plan in plans)
    assert "--enforce-eager" not in plans[0].arguments


@pytest.mark.usefixtures("two_gpus")
def test_gpus_that_the_person_chose_are_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert "CUDA_VISIBLE_DEVICES" not in engines.vllm(str(folder), (), worker=0, workers=2).env


def test_missing_folder_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(engines.ModelNotFound, match="nowhere"):
        engines.model_folder(str(tmp_path / "nowhere"))
