"""The gateway's parts, put together: what lives as long as the process."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.types import ASGIApp

from gateway import body, callers, form, options
from gateway.callers import Callers
from gateway.cancels import RUNNERS, Canceller
from gateway.endpoints import Endpoint
from gateway.errors import InvalidApiKey, Overloaded
from gateway.events import Numbering
from gateway.exchange import Exchange, exchange_of
from gateway.in_flight import InFlight
from gateway.jobs import Jobs
from gateway.keyed import KeyedRequests
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.presence import Presence
from gateway.relay import JobStream
from gateway.respond import RelayedAnswer
from gateway.settings import GatewaySettings
from gateway.submit import Limits, Submitter
from gateway.sweeper import Sweeper
from shared.apikeys import KeyStore
from shared.connection import Connections
from shared.errors import BodyTooLarge
from shared.in_flight import InFlightCounts
from shared.keys import Keys, new_job_id
from shared.logs import Log
from shared.protocol import Job, KeyRecord
from shared.registry import Registry
from shared.subscribers import Subscribers
from shared.transitions import Transitions

log = Log("gateway")

JSON_TYPE = "application/json"
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
        # Likewise: a burst of requests must not look like the queue's absence.
        self.registry_redis = Connections(settings, name=f"{name}-registry", connections=4)
        registry = Registry(self.registry_redis, keys)
        reading = Transitions(self.registry_redis, keys, result_ttl_s=settings.result_ttl_s)
        self.models = Models(settings, registry, reading, self.metrics)
        self.models.on_deserted = self._give_up
        self.callers = Callers(settings, KeyStore(self.registry_redis, keys))
        self.sweeper = Sweeper()
        self.sweeper.swept.add(self)
        # Not the gateway's id alone: another process may take that up again.
        own_name = f"{settings.gateway_id}-{secrets.token_hex(4)}"
        self.presence = Presence(registry, own_name, lease_s=settings.gateway_lease_s)
        self.in_flight = InFlight(
            InFlightCounts(self.redis, keys), submit_timeout_s=settings.submit_timeout_s
        )
        self.submitter = Submitter(
            settings,
            own_name,
            keys,
            self.subscriber,
            self.transitions,
            self.canceller,
            self.in_flight,
            self.metrics,
        )
        self.keyed = KeyedRequests(self.transitions, self.submitter, ttl_s=settings.result_ttl_s)
        self.jobs = Jobs(settings, self.redis, keys, self.transitions)
        self.bodies = body.Room(settings.max_pending_body_bytes)
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
                group.create_task(self.callers.run())
                group.create_task(self.in_flight.run())
                group.create_task(self.canceller.run())
                group.create_task(self.sweeper.run())
                group.create_task(self.presence.run())
        except* Exception:
            self.failed = True
            log.error("gateway.failed", exc=True)
            self._on_failure()

    def drain(self) -> None:
        """Refuse new requests; give the open ones `drain_timeout_s` from the port's closing on."""
        if self.draining:
            return
        settings = self.settings
        self.submitter.draining = True
        log.info("drain.began", open=self.submitter.open_streams)
        loop = asyncio.get_running_loop()
        loop.call_later(settings.drain_delay_s + settings.drain_timeout_s, self._cut)

    def _cut(self) -> None:
        for answer in tuple(self.sweeper.swept):
            if isinstance(answer, RelayedAnswer):
                answer.cut()

    def _give_up(self, deserted: Mapping[str, float]) -> None:
        """End what has waited too long for workers of pools that have none."""
        now = asyncio.get_running_loop().time()
        for answer in tuple(self.sweeper.swept):
            if isinstance(answer, RelayedAnswer):
                answer.give_up(deserted, now)

    async def close(self) -> None:
        """Let the last cancels through and close the connections."""
        self.submitter.draining = True
        await self.canceller.drain(_CLEANUP_S)
        await self.presence.leave()
        await self.redis.aclose()
        await self.cancel_redis.aclose()
        await self.registry_redis.aclose()

    def render_metrics(self) -> bytes:
        """Return the metrics with the gauges that nobody keeps."""
        self.tick(0)
        return self.metrics.render()

    def tick(self, now: float) -> None:
        """Set the gauges: another process may be asked for them. Called by the sweeper."""
        metrics = self.metrics
        metrics.open_streams.set(self.submitter.open_streams)
        metrics.pending_cancels.set(self.canceller.pending)
        metrics.reconnects.set(max(0, self.subscriber.reconnects))

    async def identify(self, request: Request) -> KeyRecord:
        """Return whose request this is. Raises `InvalidApiKey`."""
        exchange = exchange_of(request.scope)
        caller = await self.callers.identify(request.headers)
        exchange.tenant, exchange.key_id = caller.tenant, caller.id
        return caller

    async def answer(self, endpoint: Endpoint, request: Request) -> ASGIApp:
        """Turn a request into a job and its frames into an answer."""
        exchange = exchange_of(request.scope)
        exchange.endpoint = endpoint.path
        try:
            caller = await self.identify(request)
        except InvalidApiKey as error:  # A stranger's body is not read, nor its connection kept.
            exchange.outcome = error.code
            return body.Refusal(error)
        self.submitter.check_room()
        limit = self.settings.max_body_bytes
        with body.Share(self.bodies) as share:
            try:
                raw = await body.read(
                    request,
                    share,
                    limit=min(limit, caller.max_body_bytes or limit),
                    timeout_s=self.settings.body_timeout_s,
                    form=endpoint.takes_form,
                )
            except (BodyTooLarge, Overloaded) as error:
                exchange.outcome = error.code
                return body.Refusal(error)
            return await self._submit(endpoint, request, exchange, caller, raw)

    async def _submit(
        self,
        endpoint: Endpoint,
        request: Request,
        exchange: Exchange,
        caller: KeyRecord,
        raw: bytes,
    ) -> ASGIApp:
        content_type = request.headers["content-type"] if endpoint.takes_form else JSON_TYPE
        if endpoint.takes_form:
            fields = form.decode(raw, content_type)
        else:
            fields = await body.checked(raw, self.settings)
        if endpoint.path == "/v1/responses":
            body.refuse_stored_state(fields)
        asks_stream = endpoint.streams and fields.asks_stream
        asked = options.read(
            request.headers, self.settings, stream=asks_stream, on_disconnect=caller.on_disconnect
        )
        if isinstance(fields.model, str) and fields.model:
            callers.check_model(caller, fields.model)  # Before it is said whether there is one.
        await self.models.known()
        record = self.models.resolve(fields.model)
        callers.check_model(caller, record.name)
        lane = callers.lane_for(caller, fields.lane)
        exchange.model, exchange.lane = record.name, lane
        callers.check_tokens(caller, fields)
        trace = exchange.trace(request.scope)
        job = Job(
            id=new_job_id(self.models.shard(record)),
            path=endpoint.path,
            body=raw,
            content_type=content_type,
            model=record.name,
            lane=lane,
            stream=asks_stream,
            sequences=fields.sequences,
            max_tokens_given=fields.max_tokens_given,
            max_tokens=caller.max_tokens,
            tenant=caller.tenant,
            weight=caller.weight,
            request_id=exchange.request_id,
            gateway=self.settings.gateway_id,
            patience_s=asked.patience_s,
            failover=asked.failover,
            traceparent=trace.parent,
            tracestate=trace.state,
        )
        limits = Limits(
            self.models.lane_limit(record), self.models.tenant_limit(record, caller.tenant)
        )
        if asked.key is None:
            stream = await self.submitter.open(
                job, caller, limits=limits, timeout_s=asked.timeout_s, told=exchange.note_limits
            )
        else:
            stream = await self.keyed.open(
                job,
                caller,
                asked.key,
                new_id=lambda: new_job_id(self.models.shard(record)),
                limits=limits,
                timeout_s=asked.timeout_s,
                told=exchange.note_limits,
            )
        numbering = Numbering() if asked.resumable and asks_stream else None
        return self._relayed(exchange, stream, asks_stream, numbering)

    async def resume(self, job_id: str, request: Request) -> ASGIApp:
        """Relay a job's answer from behind an event on, whichever gateway submitted it."""
        exchange = exchange_of(request.scope)
        exchange.endpoint = "/v1/jobs/{id}/stream"
        caller = await self.identify(request)
        headers = request.headers
        after = options.after(request.query_params.get("after"), headers.get("last-event-id"))
        ids = options.wants_ids(headers)
        stream, attached = await self.submitter.join(job_id, caller.tenant)
        exchange.lane = attached.lane
        numbering = Numbering(after=after, ids=ids) if after or ids else None
        return self._relayed(exchange, stream, attached.stream, numbering)

    def _relayed(
        self,
        exchange: Exchange,
        stream: JobStream,
        asked_stream: bool,
        numbering: Numbering | None,
    ) -> RelayedAnswer:
        exchange.job_id = stream.job_id
        stream.request_id = exchange.request_id
        return RelayedAnswer(
            exchange,
            stream,
            asked_stream=asked_stream,
            settings=self.settings,
            submitter=self.submitter,
            sweeper=self.sweeper,
            numbering=numbering,
        )
