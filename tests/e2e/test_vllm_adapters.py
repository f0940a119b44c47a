"""Adapters (LoRA) loaded at run time by real vLLM: a small random one on the demo's model."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support import vllm as real
from tests.support.continuation import Row, continued, tell, text_of
from worker.engine.interface import AdapterError
from worker.engine.vllm import VllmEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM isn't installed"),
    pytest.mark.skipif(not real.MODEL.exists(), reason="no model: python compose/model.py"),
]

RANK = 8
LORA = ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "1")
BASE, OURS = Row("base"), Row("adapter", {"model": "ours"})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    async with real.running_engine(*real.ARGS, *LORA) as started:
        yield started


def make_adapter(directory: Path, rank: int = RANK) -> Path:
    """Write an adapter with random weights, large enough to change what the model says."""
    import torch
    from safetensors.torch import save_file

    shape = json.loads((real.MODEL / "config.json").read_text())
    size, heads = shape["hidden_size"], shape["num_attention_heads"]
    widths = {"q_proj": size, "v_proj": size * shape["num_key_value_heads"] // heads}
    made = torch.Generator().manual_seed(1)
    weights = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, width in widths.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(rank, size, generator=made) * 0.05
            weights[f"{at}.lora_B.weight"] = torch.randn(width, rank, generator=made) * 0.05
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(widths)}
    told |= {"bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(real.MODEL)}
    (directory / "adapter_config.json").write_text(json.dumps(told))
    return directory


def names(engine: VllmEngine) -> list[tuple[str, str | None]]:
    return [(model.name, model.parent) for model in engine.models]


async def test_an_adapter_is_loaded_used_continued_and_unloaded(
    engine: VllmEngine, tmp_path: Path
) -> None:
    assert names(engine) == [(real.NAME, None)]
    base = await tell(engine, BASE, "base")
    await engine.load_adapter("ours", str(make_adapter(tmp_path / "ours")))
    assert names(engine) == [(real.NAME, None), ("ours", real.NAME)]
    ours = await tell(engine, OURS, "ours")
    assert text_of(ours.events) != text_of(base.events)
    assert b'"model":"ours"' in ours.events[0]
    assert (await tell(engine, BASE, "base again")).steps == base.steps

    # Another worker continues it with the adapter, not with the base model.
    assert engine.resumable(OURS.path, json.dumps(OURS.body).encode())
    for cut in ours.cuts()[1::4]:
        again = await continued(engine, OURS, ours, cut)
        assert again.steps == ours.steps
        assert again.events == ours.events

    # What runs when it is unloaded is answered to its end, by the adapter.
    body = {"messages": OURS.body["messages"], "model": "ours", "max_tokens": 40, "stream": True}
    async with real.job(engine, OURS.path, temperature=0, **body) as running:
        await running.wait_events(3, real.PATIENCE)
        await engine.unload_adapter("ours")
        await running.wait(real.PATIENCE)
    assert text_of(running.events).startswith(text_of(ours.events))
    assert names(engine) == [(real.NAME, None)]
    gone = await real.done(real.job(engine, OURS.path, **(body | {"stream": False})))
    assert gone.status == 404


async def test_one_that_cannot_be_loaded_leaves_the_engine_as_it_was(
    engine: VllmEngine, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    broken = make_adapter(tmp_path / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"nothing of the kind")
    sources = {
        str(tmp_path / "absent"): "No adapter found",
        str(tmp_path / "empty"): "No adapter found",
        str(broken): "",
        str(make_adapter(tmp_path / "wide", rank=16)): "rank",
    }
    for source, said in sources.items():
        with pytest.raises(AdapterError, match=said):
            await engine.load_adapter("ours", source)
    assert names(engine) == [(real.NAME, None)]
    assert (await real.done(real.chat(engine, "Hi", max_tokens=2))).status == 200
