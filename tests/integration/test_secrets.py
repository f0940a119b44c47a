"""What is a secret or was asked in confidence stands where it must, and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from tests.support import sse
from tests.support.processes import Pool
from tests.support.valkey import ValkeyServer, free_port
from tests.support.waiting import until

PROMPT = f"canary{secrets.token_hex(8)}"
PASSWORD = f"password{secrets.token_hex(8)}"
BODY = {"model": "simulated", "max_tokens": 3, "messages": [{"role": "user", "content": PROMPT}]}
LONG = {**BODY, "stream": True, "max_tokens": 3000}

WRONG: list[Any] = [
    {**BODY, "model": "no-such-model"},
    {**BODY, "model": "forbidden"},
    {**BODY, "service_tier": "priority"},
    {**BODY, "n": "many"},
    {**BODY, "max_tokens": "x"},
    {**BODY, "messages": PROMPT},
    {**BODY, "user": "x" * 5000},
    {**BODY, "headrace_fault": {"raise": 1}},
    {**BODY, "headrace_fault": {"error": 1}},
    {**BODY, "stream": True, "headrace_fault": {"raise": 2}},
    json.dumps(BODY).encode()[:-5],
    f'{{"messages": ["{PROMPT}", 1{"0" * 5000}]}}'.encode(),
    json.dumps(PROMPT).encode(),
    PROMPT.encode() + b"\xff",
]
"""Each is refused or fails, here or at the worker."""


def stored(server: ValkeyServer) -> dict[str, bytes]:
    """Return all that the server holds, by key."""
    readers = {
        b"hash": ("HGETALL",),
        b"string": ("GET",),
        b"set": ("SMEMBERS",),
        b"stream": ("XRANGE", "-", "+"),
    }
    held = {}
    for name in server.command("KEYS", "*"):
        command, *rest = readers[server.command("TYPE", name)]
        held[name.decode()] = name + repr(server.command(command, name, *rest)).encode()
    return held


def arguments_and_titles() -> bytes:
    """Return the command lines of all processes that can be seen."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            lines.append((entry / "cmdline").read_bytes() + (entry / "comm").read_bytes())
    return b"\n".join(lines)


async def make_key(url: str, *options: str) -> str:
    """Make a key with the program, as people do."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shared.admin", "--json", "keys", "create", "me", *options),
        env={**os.environ, "HEADRACE_REDIS_URL": url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    return str(json.loads(out)["secret"])


class Witness:
    """Sends what is wrong, and remembers all that was told."""

    def __init__(self, pool: Pool, secret: str) -> None:
        self.pool = pool
        self.chat = f"{pool.url}/v1/chat/completions"
        self.headers = {"Authorization": f"Bearer {secret}"}
        self.told: list[bytes] = []

    async def send(self, body: object, headers: dict[str, str], url: str = "") -> sse.Response:
        response, answer = await sse.fetch(url or self.chat, body, headers=headers)
        self.told.append(answer + repr(response.headers).encode())
        return response

    async def ask_wrongly(self, secret: str, *others: str) -> None:
        for body in WRONG:
            response = await self.send(body, self.headers)
            assert response.status >= 400 or response.ending == "cut", body
        for other in others:
            assert (await self.send(BODY, {"x-api-key": other})).status == 401
            assert (await self.send(BODY, {"authorization": f"Bearer {other}"})).status == 401
        for path in (f"no/{secret}?key={secret}", "models/none"):
            url = f"{self.pool.url}/v1/{path}"
            assert (await self.send(None, self.headers, url)).status == 404
        keyed = {**self.headers, "Idempotency-Key": PROMPT}
        assert (await sse.fetch(self.chat, BODY, headers=keyed))[0].status == 200
        assert (await self.send({**BODY, "max_tokens": 4}, keyed)).status == 409

    async def lose_the_link(self, server: ValkeyServer) -> None:
        """Have the processes lose the queue while they stream, and the client leave."""
        async with sse.open_response(self.chat, LONG, headers=self.headers):
            for kind in ("normal", "pubsub"):
                server.command("CLIENT", "KILL", "TYPE", kind)
        await until(lambda: "pubsub.back" in self.pool.gateways[0].log, "the link is back")


async def test_neither_keys_nor_prompts_are_told(own_valkey: ValkeyServer) -> None:
    own_valkey.command("ACL", "SETUSER", "pool", "on", f">{PASSWORD}", "~*", "&*", "+@all")
    url = own_valkey.url.replace("://", f"://pool:{PASSWORD}@")
    metrics = free_port()
    common = {"log_level": "debug", "log_format": "json"}
    secret = await make_key(
        url, "--models", "simulated,no-such-model", "--highest-lane", "batch", "--max-tokens", "9"
    )
    wrong = secret[:-4] + ("0000" if secret[-4:] != "0000" else "1111")
    async with Pool(
        url,
        gateway={**common, "auth": "auto", "max_body_bytes": 4096},
        worker={**common, "metrics_port": metrics},
        simulated={"tpot_ms": 5},
    ) as pool:
        witness = Witness(pool, secret)
        # The limit of the key is the answer's, whatever the body says.
        asked = {**BODY, "max_tokens": 50}
        _, answer = await sse.fetch(witness.chat, asked, headers=witness.headers)
        assert json.loads(answer)["usage"]["completion_tokens"] == 9
        await witness.ask_wrongly(secret, wrong, f"{secret}x", "sk-other-secret")
        await witness.lose_the_link(own_valkey)
        for page in (f"{pool.url}/metrics", f"http://127.0.0.1:{metrics}/metrics"):
            witness.told.append((await sse.fetch(page))[1])
        witness.told.append(arguments_and_titles())
        held = stored(own_valkey)
        logs = {process.name: process.log.encode() for process in pool.processes}
    assert b"request.finished" in logs["gateway-0"]
    assert b"job.adopted" in logs["worker-0"]
    hidden = [secret[-48:].encode(), wrong[-48:].encode(), b"sk-other-secret", PASSWORD.encode()]
    for place in (*logs.values(), *witness.told):
        assert [one for one in (*hidden, PROMPT.encode()) if one in place] == [], place[:2000]
    for name, value in held.items():
        assert [one for one in hidden if one in value] == [], name
        # What was asked is in its job alone, and what was answered in its log.
        assert PROMPT.encode() not in value or ":job:" in name or ":log:" in name, name
