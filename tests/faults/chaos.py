"""Random faults under steady load, for a chosen time: `python -m tests.faults.chaos`.

The seed decides which faults come, to whom and when. Every answer is checked as in the rows. Where
one is wrong, the seed and the history of faults are shown.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from shared.errors import NoWorker, Poisoned, QueueUnavailable
from tests.faults.clients import CUT, EXACT, Client
from tests.faults.scene import MIXED, Row, Scene
from tests.support.processes import Process
from tests.support.valkey import ValkeyServer

IN_FLIGHT = 30
WORKERS = 3
GATEWAYS = 2
ROW = Row(
    "chaos",
    # A gateway's death cuts; without queue or workers new work is refused; and a job that has cost
    # two workers without a token in between is taken for what killed them.
    allowed=[CUT, QueueUnavailable.code, NoWorker.code, Poisoned.code],
    stall_s=60,
)


class Chaos:
    """One run: load, faults and what became of them."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self.history: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.longest_s = 0.0
        self._scene = scene
        self._random = random.Random(seed)
        self._begun = time.monotonic()
        self._faults: list[Callable[[], Awaitable[None]]] = [
            self.worker_killed,
            self.worker_killed,
            self.worker_frozen,
            self.worker_asked_to_leave,
            self.worker_link_cut,
            self.worker_link_stranded,
            self.gateway_killed,
            self.gateway_link_cut,
            self.gateway_link_stranded,
            self.subscriptions_killed,
            self.queue_restarted,
            self.queue_frozen,
        ]

    async def run(self, seconds: float) -> None:
        """Strike for so long, then see everything to its end."""
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            load = [group.create_task(self._load(until)) for _ in range(IN_FLIGHT)]
            while time.monotonic() < until:
                await asyncio.sleep(self._random.uniform(0.5, 6))
                await self._random.choice(self._faults)()
            await asyncio.wait(load)
        await self._scene.settle()

    def note(self, fault: str) -> None:
        line = f"{time.monotonic() - self._begun:7.2f} s  {fault}"
        self.history.append(line)
        say(line)

    async def _load(self, until: float) -> None:
        """Make one request after the other, and check each."""
        tokens = random.Random(self._random.random())
        while time.monotonic() < until:
            count = tokens.randint(1, 250)
            (client,) = self._scene.send(1, tokens=count, mix=[tokens.choice(MIXED)])
            async with asyncio.timeout(90):
                await self._scene.run_of(client)
            self._check(client)
            if client.outcome() != EXACT:
                await asyncio.sleep(0.2)

    def _check(self, client: Client) -> None:
        self.outcomes += self._scene.judge([client]).outcomes
        if client.outcome() == EXACT and client.streams:
            self.longest_s = max(self.longest_s, client.stall_s)

    def _one(self, processes: list[Process]) -> Process:
        return self._random.choice([one for one in processes if one.running])

    # --- the faults ---

    async def worker_killed(self) -> None:
        victim = self._one([*self._scene.workers])
        self.note(f"{victim.name} killed")
        self._scene.kill(victim)
        await asyncio.sleep(self._random.uniform(0, 3))
        self._scene.pool.add_worker(self._scene.worker_link.url)

    async def worker_frozen(self) -> None:
        victim, for_s = self._one([*self._scene.workers]), self._random.uniform(0.5, 6)
        self.note(f"{victim.name} frozen for {for_s:.1f} s")
        victim.pause()
        await asyncio.sleep(for_s)
        victim.resume()

    async def worker_asked_to_leave(self) -> None:
        victim = self._one([*self._scene.workers])
        self.note(f"{victim.name} asked to leave")
        self._scene.pool.add_worker(self._scene.worker_link.url)
        victim.terminate()
        await self._scene.wait_gone(victim, 0, timeout=60)

    async def worker_link_cut(self) -> None:
        self.note("workers' links cut")
        self._scene.worker_link.cut()

    async def worker_link_stranded(self) -> None:
        self.note("workers' links half open")
        self._scene.worker_link.strand()

    async def gateway_killed(self) -> None:
        victim = self._one([*self._scene.gateways])
        self.note(f"{victim.name} killed")
        victim.kill()
        await victim.wait()
        victim.start()
        await asyncio.sleep(2)  # The other one may be next.

    async def gateway_link_cut(self) -> None:
        self.note("gateway-0's link cut")
        self._scene.gateway_link.cut()

    async def gateway_link_stranded(self) -> None:
        self.note("gateway-0's link half open")
        self._scene.gateway_link.strand()

    async def subscriptions_killed(self) -> None:
        self.note("subscriptions killed")
        self._scene.server.command("CLIENT", "KILL", "TYPE", "pubsub")

    async def queue_restarted(self) -> None:
        for_s = self._random.uniform(0.1, 2)
        self.note(f"queue killed for {for_s:.1f} s")
        self._scene.server.kill()
        await asyncio.sleep(for_s)
        self._scene.server.start()

    async def queue_frozen(self) -> None:
        for_s = self._random.uniform(0.5, 6)
        self.note(f"queue frozen for {for_s:.1f} s")
        self._scene.server.pause()
        await asyncio.sleep(for_s)
        self._scene.server.resume()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def main(seconds: float, seed: int) -> None:
    say(f"seed {seed}, {seconds:.0f} s")
    # What the queue tells of each job is compared at the end: until then it is to know it.
    kept = {"result_ttl_s": seconds + 300}
    scene = Scene(
        ROW,
        lambda *_: None,
        gateways=GATEWAYS,
        workers=WORKERS,
        server=ValkeyServer(appendonly=True),
        gateway_proxy=True,
        worker_proxy=True,
        gateway=kept,
        worker=kept,
    )
    async with scene:
        chaos = Chaos(scene, seed)
        try:
            await chaos.run(seconds)
        except BaseException:
            say(f"\nfailed; seed {seed}; faults until then:")
            for line in chaos.history:
                say(line)
            raise
    say(f"{dict(chaos.outcomes)}, longest stall {chaos.longest_s:.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args()
    asyncio.run(main(given.seconds, given.seed))
