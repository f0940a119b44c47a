"""Every Redis key and channel.

A tag names one shard of one pool of workers; the keys of a job and of its lanes share it as their
hash tag, so that one script may touch them all in a cluster. A job's id begins with its tag: any
gateway finds a job's keys from its id alone. `{p}` is the setting `key_prefix`.

| key | type | what it holds | TTL | written by | read by |
|---|---|---|---|---|---|
| `{p}:{tag}:lane:<lane>` | stream | one entry per job, queued or running: `j` | 7 days, renewed by submit | submit, finish, cancel, adopt | worker |
| `{p}:{tag}:lane:<lane>:returned` | stream | the same, handed back: claimed before the lane | as above | hand back | worker |
| `{p}:{tag}:lane:<lane>:tenants` | sorted set | tenant → its virtual time, of those with entries that wait | as above | submit, claim | claim, status |
| `{p}:{tag}:lane:<lane>:waiting` | sorted set | all entries that wait, by age | as above | submit, claim, cancel | claim |
| `{p}:{tag}:lane:<lane>:tenant:<tenant>` | sorted set | a tenant's entries that wait, by age | as above | submit, claim, cancel | claim, submit, status |
| `{p}:{tag}:lane:<lane>:bell` and `…:returned:bell` | list | at most one element: something waits in the stream | as above | submit, hand back, claim | worker |
| `{p}:{tag}:job:<id>` | hash | `id state rec lane entry returned owner base worker attempts strikes history deadline cancel outcome ended_by submitted started finished usage model stream tenant readers unread patience` | time-out + result TTL, then result TTL | all transitions | both |
| `{p}:{tag}:log:<id>` | stream | the job's frames, id `<seq>-0`, `f` = the channel's message | as the job's | publish, finish, cancel, adopt | gateway |
| `{p}:{tag}:cancel:<id>` | string | a cancel that came before its job | 1 minute | cancel | submit |
| `{p}:{<digest>}:request` | string | an idempotency key's hash → `<fingerprint> <job>` | time-out + result TTL | remember | gateway |
| `{p}:{tag}:dead` | stream | jobs that cost too many workers: `j rec history`, the last 1,000 | 7 days, renewed | adopt; admin deletes | admin |
| `{p}:{tag}:ch:<id>` | channel | the job's frames, `<seq> <owner> <base> <frame>` | | with the log | gateway |
| `{p}:{tag}:ctl:<worker>` | channel | nudges: `cancel <job> <owner> <reason>`, `drain`, `adapters` | | cancel, admin | worker |
| `{p}:{registry}:workers` | set | ids of workers | 1 hour, renewed by each beat | worker | gateway |
| `{p}:{registry}:worker:<id>` | string | `WorkerRecord`, MessagePack | the worker's lease | worker | gateway |
| `{p}:{registry}:gateways` | set | names of gateways | 1 hour, renewed by each announcement | gateway | worker |
| `{p}:{registry}:gateway:<name>` | string | nothing: that it is there | the gateway's lease | gateway | worker |
| `{p}:{registry}:models` | hash | model name → `ModelRecord`, MessagePack | 7 days, renewed by each beat | worker | gateway |
| `{p}:{registry}:adapters:<pool>` | hash | adapter name → `AdapterRecord`, MessagePack | 7 days, renewed by the pool's workers | admin | worker |
| `{p}:{<key>}:in_flight` | hash | job of an API key → when it was counted, ms | a day, renewed by admit | gateway | gateway |
| `{p}:{<key>}:unsettled` | hash | job of an API key whose tokens are limited and that is not charged yet → when it was counted, ms | a day, renewed by admit | gateway | gateway |
| `{p}:{<key>}:requests` | hash | second, Unix time → requests of an API key in it; `used last swept` | 62 s, renewed | gateway | gateway |
| `{p}:{<key>}:tokens` | hash | the same, of tokens | 62 s, renewed | gateway | gateway |
| `{p}:{registry}:keys` | hash | id of an API key → `KeyRecord`, MessagePack | none | admin | gateway |
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2s

LANES = ("interactive", "batch")
"""In order of urgency."""

GROUP = "workers"
"""The consumer group of every lane."""

REGISTRY = "registry"
"""The tag of the registry's keys."""

_TAG_LENGTH = 10
_ID_LENGTH = 32
_HEX = frozenset("0123456789abcdef")


def tag(pool: str, shard: int) -> str:
    """Return the tag, 10 hexadecimal digits, of one of a pool's shards (0 to 255)."""
    return f"{blake2s(pool.encode(), digest_size=4).hexdigest()}{shard:02x}"


def tags(pool: str, shards: int) -> list[str]:
    """Return the tags of all of a pool's shards."""
    return [tag(pool, shard) for shard in range(shards)]


def new_job_id(job_tag: str) -> str:
    """Return an unguessable job id, 32 hexadecimal digits, in the tag's slot."""
    return job_tag + secrets.token_hex((_ID_LENGTH - _TAG_LENGTH) // 2)


def is_job_id(text: str) -> bool:
    """Tell whether a text from outside has the form of a job id."""
    return len(text) == _ID_LENGTH and _HEX.issuperset(text)


def tag_of(job_id: str) -> str:
    """Return the tag in a job id."""
    return job_id[:_TAG_LENGTH]


def hash_tag(key: str) -> str:
    """Return the tag in a key or channel."""
    return key[key.index("{") + 1 : key.index("}")]


@dataclass(frozen=True)
class Keys:
    """The key space under one prefix."""

    prefix: str = "headrace"

    def _tagged(self, job_tag: str, rest: str) -> str:
        return f"{self.prefix}:{{{job_tag}}}:{rest}"

    def lane(self, job_tag: str, lane: str) -> str:
        return self._tagged(job_tag, f"lane:{lane}")

    def returned(self, job_tag: str, lane: str) -> str:
        return self._tagged(job_tag, f"lane:{lane}:returned")

    def waiting(self, job_tag: str, lane: str) -> str:
        return self.lane(job_tag, lane) + ":waiting"

    def tenants(self, job_tag: str, lane: str) -> str:
        return self.lane(job_tag, lane) + ":tenants"

    def tenant(self, job_tag: str, lane: str, tenant: str) -> str:
        return f"{self.lane(job_tag, lane)}:tenant:{tenant}"

    def bell(self, job_tag: str, lane: str, *, returned: bool = False) -> str:
        stream = self.returned if returned else self.lane
        return stream(job_tag, lane) + ":bell"

    def job(self, job_id: str) -> str:
        return self._tagged(tag_of(job_id), f"job:{job_id}")

    def log(self, job_id: str) -> str:
        return self._tagged(tag_of(job_id), f"log:{job_id}")

    def cancel(self, job_id: str) -> str:
        return self._tagged(tag_of(job_id), f"cancel:{job_id}")

    def request(self, digest: str) -> str:
        return self._tagged(digest, "request")

    def dead(self, job_tag: str) -> str:
        return self._tagged(job_tag, "dead")

    def channel(self, job_id: str) -> str:
        return self._tagged(tag_of(job_id), f"ch:{job_id}")

    def control(self, job_tag: str, worker_id: str) -> str:
        return self._tagged(job_tag, f"ctl:{worker_id}")

    def workers(self) -> str:
        return self._tagged(REGISTRY, "workers")

    def worker(self, worker_id: str) -> str:
        return self._tagged(REGISTRY, f"worker:{worker_id}")

    def gateways(self) -> str:
        return self._tagged(REGISTRY, "gateways")

    def gateway(self, name: str) -> str:
        return self._tagged(REGISTRY, f"gateway:{name}")

    def models(self) -> str:
        return self._tagged(REGISTRY, "models")

    def adapters(self, pool: str) -> str:
        return self._tagged(REGISTRY, f"adapters:{pool}")

    def api_keys(self) -> str:
        return self._tagged(REGISTRY, "keys")

    def in_flight(self, key_id: str) -> str:
        return self._tagged(key_id, "in_flight")

    def unsettled(self, key_id: str) -> str:
        return self._tagged(key_id, "unsettled")

    def requests(self, key_id: str) -> str:
        return self._tagged(key_id, "requests")

    def tokens(self, key_id: str) -> str:
        return self._tagged(key_id, "tokens")


@lru_cache(maxsize=8192)
def written(prefix: str, job_id: str) -> tuple[bytes, bytes, bytes]:
    """Return what each write to a job names: its key, its log and its channel. Made once per job."""
    keys = Keys(prefix)
    return keys.job(job_id).encode(), keys.log(job_id).encode(), keys.channel(job_id).encode()
