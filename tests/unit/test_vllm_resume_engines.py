"""Which engines continue answers: those like the tested one."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from worker.engine import vllm_build


def engine(executor: str = "mp", pipeline: int = 1, data: int = 1, **config: Any) -> Any:
    parallel = SimpleNamespace(
        distributed_executor_backend=executor,
        pipeline_parallel_size=pipeline,
        data_parallel_size=data,
    )
    return SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel, **config))


@pytest.fixture(autouse=True)
def tested_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))


@pytest.mark.parametrize("executor", ["mp", "uni"])
def test_an_engine_like_the_tested_one_does(executor: str) -> None:
    made = engine(executor, speculative_config=None, kv_transfer_config=None)
    assert vllm_build.why_not_continue(made) == ""


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (engine("ray"), "processes"),
        (engine(pipeline=2), "pipeline"),
        (engine(data=2), "data"),
        (engine(speculative_config=object()), "speculative"),
        (engine(kv_transfer_config=object()), "kv_transfer"),
        (engine(ec_transfer_config=object()), "ec_transfer"),
    ],
)
def test_others_do_not_and_say_why(made: Any, why: str) -> None:
    assert why in vllm_build.why_not_continue(made)


def test_other_releases_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.33.0"))
    assert "0.33.0" in vllm_build.why_not_continue(engine())
