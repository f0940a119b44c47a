"""Adapters loaded at run time by `headrace-admin lora`, among real workers and a real gateway."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from shared.adapters import MOST_ADAPTERS, WANTED_TTL_MS
from shared.admin import lora
from shared.admin.access import Access, Refused
from shared.admin.arguments import parser
from shared.admin.settings import AdminSettings
from shared.protocol import AdapterRecord, ModelRecord, WorkerRecord
from tests.support.processes import Pool
from tests.support.sse import fetch
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
POOL = "simulated"
FAST = {"registry_refresh_s": 0.1}


class Stage:
    """A pool, and the programs that are used on it."""

    def __init__(self, pool: Pool, redis_url: str) -> None:
        self.pool = pool
        self._redis_url = redis_url

    async def admin(self, *words: str) -> tuple[int, Any, str]:
        """Run the program to its end: exit code, its document, standard error."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "shared.admin", "--json", *words),
            cwd=ROOT,
            env={**os.environ, "HEADRACE_REDIS_URL": self._redis_url},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode is not None
        return process.returncode, json.loads(out) if out else None, err.decode()

    async def ask(self, model: str) -> tuple[int, Any]:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        response, raw = await fetch(f"{self.pool.url}/v1/chat/completions", body)
        return response.status, json.loads(raw)

    async def cards(self) -> dict[str, Any]:
        _, raw = await fetch(f"{self.pool.url}/v1/models")
        return {card["id"]: card for card in json.loads(raw)["data"]}

    async def listed(self, *names: str) -> None:
        async def seen() -> bool:
            return set(await self.cards()) == {POOL, *names}

        await until(seen, f"{names} are listed")


@pytest.fixture(scope="module")
def server() -> Any:
    with ValkeyServer() as running:
        yield running


@pytest.fixture
async def stage(server: ValkeyServer) -> AsyncIterator[Stage]:
    server.command("FLUSHALL")
    async with Pool(server.url, workers=2, gateway=FAST) as pool:
        yield Stage(pool, server.url)


def outcomes(document: Any) -> dict[str, str]:
    return {one["worker"]: one["state"] for one in document["workers"]}


async def test_an_adapter_comes_is_used_and_goes(stage: Stage, tmp_path: Path) -> None:
    assert (await stage.ask("ours"))[0] == 404
    code, told, err = await stage.admin("lora", "load", POOL, "ours", str(tmp_path))
    assert (code, told["outcome"], err) == (0, "loaded", "")
    assert outcomes(told) == {"worker-0": "loaded", "worker-1": "loaded"}
    await stage.listed("ours")
    card = (await stage.cards())["ours"]
    assert (card["parent"], card["root"]) == (POOL, POOL)
    for _ in range(4):
        status, answer = await stage.ask("ours")
        assert (status, answer["model"]) == (200, "ours")

    # Again: there is nothing to do.
    code, told, _ = await stage.admin("lora", "load", POOL, "ours", str(tmp_path))
    assert (code, told["outcome"]) == (0, "loaded")
    code, told, _ = await stage.admin("lora", "list", POOL)
    (one,) = told["adapters"]
    assert (code, one["name"], one["source"]) == (0, "ours", str(tmp_path))
    assert outcomes(one) == {"worker-0": "loaded", "worker-1": "loaded"}

    # A worker that comes later has it before it takes anything.
    late = stage.pool.add_worker()
    await stage.pool.wait_ready()
    assert late.log.index("adapter.loaded") < late.log.index("worker.ready")
    assert set(await stage.cards()) == {POOL, "ours"}
    assert {(await stage.ask("ours"))[0] for _ in range(6)} == {200}

    code, told, _ = await stage.admin("lora", "unload", POOL, "ours")
    assert (code, told["outcome"], len(told["workers"])) == (0, "unloaded", 3)
    await stage.listed()
    await until_unknown(stage, "ours")
    code, _, err = await stage.admin("lora", "unload", POOL, "ours")
    assert (code, err) == (1, "headrace-admin: pool `simulated` has no adapter `ours`\n")


async def until_unknown(stage: Stage, name: str) -> None:
    """It is 404, and stays so: a beat of another worker doesn't bring it back."""

    async def unknown() -> bool:
        return (await stage.ask(name))[0] == 404

    await until(unknown, "it is unknown")
    for _ in range(10):
        assert (await stage.ask(name))[0] == 404
        await asyncio.sleep(0.1)


async def test_one_worker_that_cannot_load_it(stage: Stage, tmp_path: Path) -> None:
    refusing = stage.pool.add_worker(simulated={"lora": False})
    await stage.pool.wait_ready()
    code, told, _ = await stage.admin("lora", "load", POOL, "ours", str(tmp_path))
    assert (code, told["outcome"]) == (1, "failed")
    (failed,) = [one for one in told["workers"] if one["state"] == "failed"]
    assert failed["worker"] == refusing.name
    assert failed["reason"] == "HEADRACE_SIMULATED_LORA is off"
    # The two that have it would answer, the third would not: nobody may ask.
    await stage.listed()
    assert (await stage.ask("ours"))[0] == 503
    refusing.terminate()
    assert await refusing.wait() == 0
    await stage.listed("ours")
    assert (await stage.ask("ours"))[0] == 200


async def test_what_failed_is_tried_again_when_it_is_asked_for(
    stage: Stage, tmp_path: Path
) -> None:
    source = tmp_path / "later"
    code, told, _ = await stage.admin("lora", "load", POOL, "ours", str(source))
    assert (code, told["outcome"]) == (1, "failed")
    assert {one["reason"] for one in told["workers"]} == {f"there is no adapter at {source}"}
    assert (await stage.ask("ours"))[0] == 404
    source.mkdir()
    code, told, _ = await stage.admin("lora", "load", POOL, "ours", str(source))
    assert (code, told["outcome"]) == (0, "loaded")
    code, _, err = await stage.admin("lora", "load", POOL, "ours", str(tmp_path))
    assert code == 1
    assert "unload it first" in err


async def test_a_worker_that_says_nothing_is_waited_for_no_longer_than_asked(
    stage: Stage, tmp_path: Path
) -> None:
    frozen = stage.pool.workers[1]
    frozen.pause()
    try:
        words = ("lora", "load", POOL, "ours", str(tmp_path), "--wait", "0.5")
        code, told, _ = await stage.admin(*words)
    finally:
        frozen.resume()
    assert (code, told["outcome"]) == (1, "timed_out")
    assert outcomes(told) == {"worker-0": "loaded", "worker-1": "waiting"}
    await stage.listed("ours")


@pytest.mark.parametrize(
    ("model", "name", "code"),
    [
        ("m", "m", "name_taken"),
        ("m", "alias", "name_taken"),
        ("m", "static", "name_taken"),
        ("m", "theirs", "name_taken"),
        ("m", "wanted-there", "name_taken"),
        ("other", "a", "model_not_found"),
        ("static", "a", "not_a_model"),
    ],
)
async def test_names_that_stand_for_something_else_are_refused(
    server: ValkeyServer, model: str, name: str, code: str
) -> None:
    server.command("FLUSHALL")
    async with Access(AdminSettings(redis_url=SecretStr(server.url))) as access:
        for pool, names in (("m", ["m", "alias", "static"]), ("p", ["p", "theirs"])):
            models = [
                ModelRecord(name=one, pool=pool, parent=pool if one == "static" else None)
                for one in names
            ]
            worker = WorkerRecord(id=pool, pool=pool, models=names, state="ready", seats=1)
            await access.registry.announce(worker, models, 60)
        await access.adapters.want("p", AdapterRecord(name="wanted-there", source="/x"))
        with pytest.raises(Refused) as refused:
            await lora.load(access, model, name, "/x", 0)
        assert refused.value.code == code
        assert await access.adapters.wanted("m") == {}


async def test_a_pool_takes_so_many_adapters_and_keeps_them_a_week(server: ValkeyServer) -> None:
    server.command("FLUSHALL")
    async with Access(AdminSettings(redis_url=SecretStr(server.url))) as access:
        worker = WorkerRecord(id="w", pool="m", models=["m"], state="ready", seats=1)
        await access.registry.announce(worker, [ModelRecord(name="m", pool="m")], 60)
        await access.registry.leave("w")
        for number in range(MOST_ADAPTERS):
            change = await lora.load(access, "m", f"a{number}", "/x", 60)
            assert (change.outcome, change.workers) == ("no_worker", [])
        with pytest.raises(Refused) as refused:
            await lora.load(access, "m", "more", "/x", 60)
        assert refused.value.code == "too_many_adapters"
        assert 0 < server.command("PTTL", access.keys.adapters("m")) <= WANTED_TTL_MS
        assert (await lora.unload(access, "m", "a0", 60)).outcome == "no_worker"
        assert len(await access.adapters.wanted("m")) == MOST_ADAPTERS - 1


@pytest.mark.parametrize(
    ("name", "source"),
    [("a b", "/x"), ("-a", "/x"), ("a" * 129, "/x"), ("a", "x"), ("a", "/x\ny"), ("a", "../x/y")],
)
def test_wrong_names_and_sources_are_wrong_usage(name: str, source: str) -> None:
    assert parser().parse_args(["lora", "load", "m", "a/b", "own/er"]).source == "own/er"
    with pytest.raises(SystemExit) as left:
        parser().parse_args(["lora", "load", "m", name, source])
    assert left.value.code == 2


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_no_client_can_load_or_unload(server: ValkeyServer, path: str) -> None:
    server.command("FLUSHALL")
    async with Pool(server.url, workers=0, gateway=FAST) as pool:
        body = {"model": POOL, "lora_name": "x", "lora_path": "/x"}
        response, _ = await fetch(f"{pool.url}{path}", body)
        assert response.status == 404
