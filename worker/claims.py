"""Takes jobs for this worker: only what its engine can start now, the urgent lane first.

The backlog stays in the queue, where it can be cancelled and counted. Batch work takes only seats
above the reserve.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

import msgspec

from shared.border import translated
from shared.connection import Clients
from shared.errors import LanesLost, QueueUnavailable, Unavailable
from shared.keys import LANES, tag
from shared.logs import Log, about
from shared.outage import Outage
from shared.outcomes import Adopted, Claimed
from shared.transitions import Transitions
from worker.engine.interface import Engine
from worker.running import Running
from worker.settings import WorkerSettings

log = Log("claims")

AT_ONCE = 4
AT_ONCE_SHARE = 0.25
"""Most jobs to claim in one go, or as a share of the free seats, whichever is more: what is claimed
can't be taken by an idler worker."""
PREDECESSOR_S = 0.001
"""How late an entry must be to be taken over from an earlier process of the same name."""
BLOCK_S = 1.0
SUSPECT_POLL_S = 0.02
"""How often to look, while suspects keep others waiting, whether they have got further."""
FULL_POLL_S = 0.02
"""How often to look again while the engine, not its seats, has no room."""


@dataclass(frozen=True)
class Options:
    """What to claim besides the lanes' share: see `Lanes.claim`."""

    returned: bool
    batch_turn: int
    batch_max_wait_s: float


class Claims:
    """A loop that fills the engine, from one shard of the pool's queue.

    `run()` ends after `stop()`, with nothing left claimed.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        transitions: Transitions,
        blocking: Clients,
        clients: Clients,
        running: Running,
        start: Callable[[Adopted], None],
        shard: int = 0,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._transitions = transitions
        self._blocking = blocking
        self._clients = clients
        self._shard = shard
        self._running = running
        self._start = start
        self.drops: Callable[[Adopted], Awaitable[bool]] = _none
        """Whether a job isn't worth beginning, because nobody will fetch its answer."""
        self.pool = settings.pool
        """Known once the engine has started, as are its seats."""
        self._stopping = False
        self._blocked_on: tuple[str, ...] = ()
        self._client_id = 0
        self._begun = False
        """Whether what is ours can only be of this process, not of one before it with its name."""
        self._unsure = True
        """Whether entries may be ours without our knowing: a reply was lost."""
        self._odd = False
        """Whether batch work, where it has waited too long, comes first for a single free seat."""
        self._crowded = False
        """Whether a suspect was handed back that must wait until no other runs here."""

    def tag(self) -> str:
        """Return the tag of its keys."""
        return tag(self.pool, self._shard)

    def _limits(self) -> dict[str, int]:
        """Return lane → the most jobs to have claimed after it; empty where there is no room."""
        load = self._engine.load()
        if self._running.jobs and (load.waiting or load.kv_usage > self._settings.kv_high):
            return {}
        limits = {}
        for lane in LANES:
            free = self._free(lane)
            if free > 0:
                limits[lane] = min(free, max(AT_ONCE, int(free * AT_ONCE_SHARE)))
        return limits

    def _free(self, lane: str) -> int:
        """Return the seats that a lane's next jobs may take."""
        free = self._engine.seats - self._running.sequences
        if lane == LANES[0]:
            return free
        return free - reserve(self._engine.seats, self._settings.interactive_reserve)

    def _batch_room(self) -> int:
        """Return the seats that batch may take where it has waited too long: free ones, as long as
        it holds no more than are not reserved."""
        seats, batch = self._engine.seats, LANES[-1]
        held = self._running.sequences_of(batch)
        return min(
            self._free(LANES[0]), seats - reserve(seats, self._settings.interactive_reserve) - held
        )

    def stop(self) -> None:
        """Claim nothing more."""
        self._stopping = True

    async def unblock(self) -> None:
        """End a wait for work: the lanes that may be claimed have changed."""
        if self._blocked_on and (self._stopping or tuple(self._limits()) != self._blocked_on):
            with contextlib.suppress(Exception):
                await self._clients.at(self.tag()).client_unblock(self._client_id)

    async def run(self) -> None:
        """Claim until stopped."""
        delay_s = 0.0
        outage = Outage(log, "queue.unreachable", "queue.reached", shard=self._shard)
        while not self._stopping:
            try:
                if self._unsure:
                    await self._recover()
                    outage.over()
                await self._turn()
                delay_s = 0.0
            except LanesLost:
                log.warning("lanes.lost")
                self._unsure = True
                await asyncio.sleep(0.05)
            except Unavailable as error:
                self._unsure = True
                delay_s = min(max(delay_s * 2, 0.1), 1.0)
                outage.note(error)
                await asyncio.sleep(delay_s)

    async def _recover(self) -> None:
        """Create what is missing and adopt what is ours by a claim whose reply was lost."""
        await self._transitions.create_lanes([self.tag()])
        worker = self._settings.worker_id
        for claimed in await self._transitions.pending(self.tag(), worker=worker):
            if claimed.job_id not in self._running.jobs:
                await self._adopt(claimed, idle_s=0 if self._begun else PREDECESSOR_S)
        self._begun = True
        async with translated():
            self._client_id = await self._blocking.run(self.tag(), lambda redis: redis.client_id())
        self._unsure = False

    async def _turn(self) -> None:
        """Claim once, waiting for work if there is room and none is there."""
        limits = self._limits()
        if not limits:
            await self._running.changed(timeout_s=FULL_POLL_S)
            return
        worker = self._settings.worker_id
        # What was handed back may be suspect. One that can't run beside others waits for them.
        self._crowded = self._crowded and self._running.suspect
        returned = not self._crowded and self._running.takes_suspect()
        max_wait_s = self._settings.batch_max_wait_s
        room = min(max(self._batch_room(), 0), AT_ONCE) if max_wait_s else 0
        wanted = {**limits, LANES[-1]: limits.get(LANES[-1], 0)} if room else limits
        options = Options(returned, (room + self._odd) // 2, max_wait_s)
        claimed = await self._transitions.claim(self.tag(), wanted, worker, **asdict(options))
        if not claimed:
            claimed = await self._wait(tuple(limits), wanted, options)
        if not claimed:
            return
        self._odd = not self._odd
        adoptions = (self._adopt(one) for one in claimed)
        # Wait for all, also after a failure: one that is still under way would be adopted twice.
        for failure in await asyncio.gather(*adoptions, return_exceptions=True):
            if failure is not None:
                raise failure

    async def _wait(
        self, lanes: tuple[str, ...], wanted: dict[str, int], options: Options
    ) -> list[Claimed]:
        """Wait until there is something to claim, and do."""
        self._blocked_on = lanes
        try:
            if self._stopping:
                return []
            return await self._transitions.wait_claim(
                self._blocking,
                self.tag(),
                wanted,
                self._settings.worker_id,
                BLOCK_S if options.returned else SUSPECT_POLL_S,
                **asdict(options),
            )
        finally:
            self._blocked_on = ()

    async def take_over(self, claimed: Claimed) -> bool:
        """Adopt another worker's job whose lease has lapsed; False if there is no room now."""
        room = self._free(claimed.lane) > 0 and self._running.takes_suspect()
        if self._stopping or not room:
            return False
        await self._adopt(claimed, idle_s=self._settings.lease_s)
        return True

    async def _adopt(self, claimed: Claimed, *, idle_s: float = 0) -> None:
        try:
            adopted = await self._transitions.adopt(
                claimed, secrets.token_hex(8), self._settings.worker_id, idle_s=idle_s
            )
        except QueueUnavailable:
            self._unsure = True
            raise
        except msgspec.MsgspecError as error:
            log.error("job.unreadable", job=claimed.job_id, error=str(error))
            await self._transitions.cancel(claimed.job_id, claimed.lane, force=True)
            return
        if isinstance(adopted, str):
            if adopted != "held":
                log.info("job.dropped", job=claimed.job_id, reason=adopted)
        elif self._refuses(adopted):
            await self._transitions.hand_back(adopted, begun=False)
            log.info("job.handed_back", **about(adopted.job), lane=claimed.lane)
        elif await self._dropped(adopted):
            log.info("job.dropped", **about(adopted.job), reason="abandoned")
        else:
            if adopted.strikes:
                log.warning("job.taken_over", **about(adopted.job), strikes=adopted.strikes)
            self._start(adopted)

    async def _dropped(self, adopted: Adopted) -> bool:
        job = adopted.job
        try:
            if not await self.drops(adopted):
                return False
            await self._transitions.cancel(job.id, job.lane, force=True)
        except QueueUnavailable:
            return False  # It is found out later, while it runs.
        return True

    def _refuses(self, adopted: Adopted) -> bool:
        """Tell whether a job can't be started here now, though it was claimed."""
        strikes = adopted.strikes
        crowded = strikes > 0 and not self._running.takes_suspect(strikes)
        self._crowded = self._crowded or crowded
        lane = adopted.claimed.lane
        room = self._free(lane) if lane == LANES[0] else self._batch_room()
        return self._stopping or crowded or room <= 0


async def _none(adopted: Adopted) -> bool:
    return False


def reserve(seats: int, share: float) -> int:
    """Return the seats that batch work may not take; at least one is always left for it."""
    return min(int(seats * share), seats - 1)
