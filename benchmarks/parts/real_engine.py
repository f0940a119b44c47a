"""Real vLLM on this machine: through Headrace, and by `vllm serve` with the same arguments."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.accounts import Account
from benchmarks.figures import Bar, Options, Part
from benchmarks.load import WORDS, Answer, chat_request, check, connect
from benchmarks.targets import Target, environment, folder, running, with_env
from tests.support.processes import Pool
from tests.support.valkey import ValkeyServer, free_port

MODEL = Path(".headrace/models/SmolLM2-135M-Instruct")
_NAME = "smollm2"
_ARGUMENTS = ("--max-model-len", "2048", "--enforce-eager", "--max-num-seqs", "16")
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_START_S = 180.0
_TOKENS = {16: 48, 1: 32}
"""Answer length by the number of chats at once."""
_TOPICS = ("a river", "an old engine", "glass", "the harbour at night", "a bridge", "winter wheat")


class Spoken(NamedTuple):
    """One round of chats."""

    tokens_per_s: float
    ttft_ms: float


async def run(options: Options) -> Part:
    part = Part("vllm", "Real vLLM on the CPU, Headrace against `vllm serve`, in turn")
    part.skipped = missing()
    if part.skipped:
        return part
    spoken: dict[tuple[str, int], list[Spoken]] = {}
    with environment(_ENVIRONMENT):
        async with AsyncExitStack() as stack:
            # One after the other: two at once would each measure the other's memory as taken.
            served = await stack.enter_async_context(vllm_serve())
            pooled = await stack.enter_async_context(vllm_pool())
            print("  both are loaded", flush=True)
            for target in (served, pooled):
                await _speak(target, 2, 8, turn=0)
            for chats, rounds in ((16, options.rounds(4)), (1, options.rounds(4))):
                for turn in range(1, 1 + rounds):
                    for target in (served, pooled):
                        done = await _round(target, chats, turn, part)
                        spoken.setdefault((target.name, chats), []).append(done)
    for chats in _TOKENS:
        _report(part, chats, spoken["vllm serve", chats], spoken["pool", chats])
    return part


async def _round(target: Target, chats: int, turn: int, part: Part) -> Spoken:
    account = Account(target.pids)
    done = await _speak(target, chats, _TOKENS[chats], turn)
    bill = account.close()
    # The engines' cores are processes of their own, so what others used can't be told apart here.
    used = {f"{role}_cores": round(bill.cores[role], 3) for role in target.pids}
    part.record({"target": target.name, "chats": chats, **done._asdict(), **used})
    return done


async def _speak(target: Target, chats: int, tokens: int, turn: int) -> Spoken:
    """Have chats answered at the same time, to the same length."""
    connections = [await connect(target.port, WORDS) for _ in range(chats)]
    began = time.monotonic()
    ends: list[asyncio.Future[Answer]] = []
    for index, connection in enumerate(connections):
        topic = _TOPICS[(index + turn) % len(_TOPICS)]
        # Different from its first word on in every round: no answer may come from a cache.
        question = f"{turn}.{index}: tell me about {topic}, in {index + 3} sentences."
        fields: dict[str, Any] = {
            "model": _NAME,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        ends.append(connection.ask(chat_request(target.port, fields)))
    async with asyncio.timeout(120):
        answers = list(await asyncio.gather(*ends))
    took_s = time.monotonic() - began
    check(answers)
    total = sum(connection.usage_tokens for connection in connections)
    if total != chats * tokens:
        raise RuntimeError(f"{target.name} made {total} tokens instead of {chats * tokens}")
    for connection in connections:
        connection.close()
    return Spoken(round(total / took_s, 2), round(median(a.ttft_ms for a in answers), 1))


def _report(part: Part, chats: int, served: list[Spoken], pooled: list[Spoken]) -> None:
    many = f"{chats} chats" if chats > 1 else "1 chat"
    for name, rounds in (("vllm serve", served), ("Headrace", pooled)):
        part.add(f"{many}, {name}", "tokens/s", [each.tokens_per_s for each in rounds])
    pairs = list(zip(served, pooled, strict=True))
    bar = Bar(">=", 0.95)
    part.add(f"{many}, tokens/s", "x", [p.tokens_per_s / s.tokens_per_s for s, p in pairs], bar)
    for name, rounds in (("vllm serve", served), ("Headrace", pooled)):
        part.add(f"{many}, TTFT, {name}", "ms", [each.ttft_ms for each in rounds])
    part.add(f"{many}, TTFT", "x", [p.ttft_ms / s.ttft_ms for s, p in pairs])


def missing() -> str:
    """Return what this part needs and doesn't find, if anything."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM isn't installed: make test installs it"
    if not (MODEL / "config.json").is_file():
        return f"there is no {MODEL}: python -m compose.model makes it"
    return ""


def _arguments() -> list[str]:
    return [str(MODEL.resolve()), "--served-model-name", _NAME, *_ARGUMENTS]


@asynccontextmanager
async def vllm_serve() -> AsyncIterator[Target]:
    """Run vLLM's own server."""
    program = shutil.which("vllm", path=str(Path(sys.executable).parent)) or "vllm"
    port = free_port()
    with folder() as path:
        env = {"PYTHONPATH": str(path)} if _name_vllm(path) else {}
        options = ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
        command = with_env(env, [program, "serve", *_arguments(), *options])
        async with running(
            "vllm-serve", command, port, path="/health", start_s=_START_S, grace_s=30
        ) as process:
            yield Target("vllm serve", port, {"server": process.pid})


@asynccontextmanager
async def vllm_pool() -> AsyncIterator[Target]:
    """Run a gateway, a Valkey and a worker with vLLM, on all cores like vLLM's own server."""
    with ValkeyServer("--appendonly", "yes", "--appendfsync", "everysec") as valkey:
        async with Pool(valkey.url, *_arguments(), engine="vllm", timeout=_START_S) as processes:
            gateway, worker = processes.gateways[0], processes.workers[0]
            pids = {"gateway": gateway.pid, "worker": worker.pid, "valkey": valkey.pid}
            yield Target("pool", gateway.port, pids)


def _name_vllm(path: Path) -> bool:
    """Where vLLM is installed as `vllm-cpu`, write the metadata that its command line looks for."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        version = f"{metadata.version('vllm-cpu').partition('+')[0]}+cpu"
        info = path / f"vllm-{version}.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        )
        return True
    return False
