"""Clients that people use get from a pool what they would get from OpenAI."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.clients import environments
from tests.support import vllm as real
from tests.support.bound import bound
from tests.support.vllm_pool import Stage, running_stage

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM isn't installed"),
    pytest.mark.skipif(not real.MODEL.exists(), reason="no model: python compose/model.py"),
]

SCRIPTS = Path(__file__).parent / "scripts"
REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 120.0
"""For a client's whole errand: some take seconds only to be imported."""
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "AI_SDK_LOG_WARNINGS": "false"}

SAID = "The capital of France is Paris."
TOKENS = [37, 8]


@dataclass(frozen=True)
class Client:
    """A script, and the environment that it needs; "" is the tests' own."""

    script: str
    environment: str = ""

    def __str__(self) -> str:
        return Path(self.script).stem

    @property
    def command(self) -> list[str]:
        script = str(SCRIPTS / self.script)
        if self.script.endswith(".mjs"):
            return [environments.node(), script]
        python = environments.python(self.environment) if self.environment else sys.executable
        return [python, script]

    @property
    def folder(self) -> Path:
        """Where Node's packages lie."""
        return environments.HOME / "node" if self.script.endswith(".mjs") else REPOSITORY


CLIENTS = [
    Client("openai_python.py"),
    Client("anthropic_python.py"),
    Client("curl.py"),
    Client("raw_socket.py"),
    Client("openai_python_0.py", "openai-0"),
    Client("langchain_chat.py", "langchain"),
    Client("llamaindex_like.py", "llamaindex"),
    Client("litellm_sdk.py", "litellm"),
    Client("openai_node.mjs", "node"),
    Client("vercel_ai.mjs", "node"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    async with running_stage() as started:
        yield started


def test_every_script_is_a_client() -> None:
    scripts = {one.name for one in SCRIPTS.iterdir() if one.suffix in (".py", ".mjs")}
    assert scripts - {"__init__.py", "asked.py", "asked.mjs"} == {one.script for one in CLIENTS}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("client", CLIENTS, ids=str)
async def test_client(stage: Stage, client: Client, tmp_path: Path) -> None:
    if client.environment and not environments.is_ready(client.environment):
        pytest.skip("its packages aren't there: make clients")
    if client.script == "curl.py" and shutil.which("curl") is None:
        pytest.skip("curl isn't installed")
    before = await stage.job_ids()
    async with running(client, stage.pool.url, tmp_path / "errors") as told:
        # The program still runs: what it has left must end all the same.
        await stage.until_idle(timeout=5)
        jobs = await stage.ended(await stage.job_ids() - before, timeout=5)
    assert told["stream"] == SAID, told
    assert told["usage"] == TOKENS, told
    name, arguments = told["tool"]
    assert name == "weather"
    assert isinstance(arguments["city"], str)
    assert told["error"] == [404, "model_not_found"], told
    assert 3 <= told["left_after"] < 10
    outcomes = Counter(job.outcome for job in jobs.values())
    assert outcomes == {"completed": 2, "cancelled": 1}


@asynccontextmanager
async def running(client: Client, url: str, errors: Path) -> AsyncIterator[dict[str, Any]]:
    """Run a script; yield its report while it waits for its end."""
    environment = {**os.environ, **QUIET, "PYTHONPATH": str(REPOSITORY)}
    command = bound([*client.command, url, real.NAME])
    with errors.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=client.folder, env=environment, stdin=PIPE, stdout=PIPE, stderr=file
        )
    assert process.stdin is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            report = await _report(process)
        assert report is not None, _last_words(errors)
        yield report
        process.stdin.close()
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0, _last_words(errors)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _last_words(errors: Path) -> str:
    return errors.read_text(errors="replace")[-3000:]


async def _report(process: Process) -> dict[str, Any] | None:
    """Read up to the report: libraries, too, have something to say."""
    assert process.stdout is not None
    async for line in process.stdout:
        if line.startswith(b'{"client"'):
            report: dict[str, Any] = json.loads(line)
            return report
    return None
