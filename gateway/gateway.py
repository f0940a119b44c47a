"""The gateway's parts, put together: what lives as long as the process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp

from gateway import body
from gateway.cancels import RUNNERS, Canceller
from gateway.endpoints import Endpoint
from gateway.exchange import exchange_of
from gateway.jobs import Jobs
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.respond import RelayedAnswer
from gateway.settings import GatewaySettings
from gateway.submit import Submitter
from gateway.sweeper import Sweeper
from shared.connection import Connections
from shared.errors import BodyTooLarge, Draining, InvalidRequest
from shared.keys import Keys, new_job_id
from shared.logs import Log
from shared.protocol import Job
from shared.registry import Registry
from shared.subscribers import Subscribers
from shared.transitions import Transitions

log = Log("gateway")

_CLEANUP_S = 5.0


class Gateway:
    """Everything that requests share. `run()` is the long tasks; when one dies, all end."""

    def __init__(self, settings: GatewaySettings, *, on_failure: Callable[[], None]) -> None:
        name = f"gateway-{settings.gateway_id}"
        keys = Keys(settings.key_prefix)
        self.settings = settings
        self.metrics = Metrics()
        self.redis = Connections(settings, name=name)
        self.subscriber = Subscribers(
            settings, name=f"{name}-pubsub", ack_timeout_s=settings.redis_timeout_s
        )
        self.transitions = Transitions(self.redis, keys, result_ttl_s=settings.result_ttl_s)
        # On connections of its own: a storm of cancels and one of requests must not meet.
        self.cancel_redis = Connections(settings, name=f"{name}-cancels", connections=RUNNERS)
        self.canceller = Canceller(
            Transitions(self.cancel_redis, keys, result_ttl_s=settings.result_ttl_s),
            force_after_s=settings.force_cancel_s,
        )
        self.models = Models(settings, Registry(self.redis, keys), self.transitions, self.metrics)
        self.sweeper = Sweeper()
        self.submitter = Submitter(
            settings, keys, self.subscriber, self.transitions, self.canceller, self.metrics
        )
        self.jobs = Jobs(settings, self.transitions)
        self.failed = False
        self._on_failure = on_failure

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self.submitter.draining

    async def run(self) -> None:
        """Run the long tasks until cancelled. One that dies takes the process with it."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.subscriber.run())
                group.create_task(self.models.run())
                group.create_task(self.canceller.run())
                group.create_task(self.sweeper.run())
        except* Exception:
            self.failed = True
            log.error("gateway.failed", exc=True)
            self._on_failure()

    def drain(self) -> None:
        """Refuse new requests; give the open ones `drain_timeout_s`, then cut them."""
        if self.draining:
            return
        self.submitter.draining = True
        log.info("drain.began", open=self.submitter.open_streams)
        loop = asyncio.get_running_loop()
        loop.call_later(self.settings.drain_timeout_s, self._cut)

    def _cut(self) -> None:
        for answer in tuple(self.sweeper.swept):
            if isinstance(answer, RelayedAnswer):
                answer.cut(Draining())

    async def close(self) -> None:
        """Let the last cancels through and close the connections."""
        self.submitter.draining = True
        await self.canceller.drain(_CLEANUP_S)
        await self.redis.aclose()
        await self.cancel_redis.aclose()

    def render_metrics(self) -> bytes:
        """Return the metrics with the gauges that nobody keeps."""
        metrics = self.metrics
        metrics.open_streams.set(self.submitter.open_streams)
        metrics.pending_cancels.set(self.canceller.pending)
        metrics.reconnects.set(max(0, self.subscriber.reconnects))
        return metrics.render()

    async def answer(self, endpoint: Endpoint, request: Request) -> ASGIApp:
        """Turn a request into a job and its frames into an answer."""
        settings, exchange = self.settings, exchange_of(request.scope)
        exchange.endpoint = endpoint.path
        self.submitter.check_room()
        try:
            raw = await body.read(
                request, limit=settings.max_body_bytes, timeout_s=settings.body_timeout_s
            )
        except BodyTooLarge as error:
            exchange.outcome = error.code
            return body.Refusal(error)
        fields = body.decode(raw)
        body.refuse_stored_state(fields)
        timeout_s = self._timeout(request.headers.get("x-request-timeout"))
        record = self.models.resolve(fields.model)
        exchange.model, exchange.lane = record.name, fields.lane
        job = Job(
            id=new_job_id(self.models.shard(record)),
            path=endpoint.path,
            body=raw,
            model=record.name,
            lane=fields.lane,
            stream=endpoint.streams and fields.asks_stream,
            sequences=fields.sequences,
            max_tokens_given=fields.max_tokens_given,
            request_id=exchange.request_id,
            gateway=settings.gateway_id,
        )
        stream = await self.submitter.open(
            job, limit=self.models.lane_limit(record), timeout_s=timeout_s
        )
        exchange.job_id = job.id
        return RelayedAnswer(
            exchange,
            stream,
            asked_stream=job.stream,
            settings=settings,
            submitter=self.submitter,
            sweeper=self.sweeper,
        )

    def _timeout(self, header: str | None) -> float:
        """Return the request's time limit, seconds."""
        if header is None:
            return self.settings.request_timeout_s
        try:
            asked_s = float(header)
        except ValueError:
            asked_s = math.nan
        if not 0 < asked_s < math.inf:
            raise InvalidRequest(
                "`X-Request-Timeout` must be a number of seconds above 0.",
                param="X-Request-Timeout",
            )
        return min(asked_s, self.settings.max_request_timeout_s)
