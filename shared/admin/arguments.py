"""The command line of `headrace-admin`."""

from __future__ import annotations

import argparse
import re
from functools import partial
from typing import Any

from shared.apikeys import LEAST_WEIGHT, MOST_WEIGHT, is_key_id
from shared.keys import LANES

_MOST = 100_000
"""Highest `--limit`."""
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_MODEL = re.compile(r"[!-+\--~]{1,256}")
"""A model's name: what can be seen, but no comma."""
_POLICY = re.compile(r"cancel|continue|grace=[0-9]{1,6}")
_ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@/-]{0,127}")
_SOURCE = re.compile(
    r"/[^\x00-\x1f\x7f]{1,1023}|[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.A
)
"""A directory on the workers' machines, or a repository at the hub."""
_MOST_MODELS = 256
KEY_LIMITS = {
    "max_tokens": (10_000_000, "longest answer, tokens"),
    "max_in_flight": (10_000, "most requests at once"),
    "max_body_bytes": (4 << 30, "largest request"),
    "requests_per_minute": (1_000_000, "most requests in a minute"),
    "tokens_per_minute": (1_000_000_000, "most tokens in a minute, prompts and answers"),
}
"""A key's limits, as its record names them: the highest, and what it is."""
_LONGEST_GRACE_S = 90 * 24 * 3600


class _Parser(argparse.ArgumentParser):
    """A parser that also takes `--json` behind the command, where many look for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_argument(
            "--json",
            action="store_true",
            default=argparse.SUPPRESS,
            help="answer with one JSON document",
        )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = _Parser(
        prog="headrace-admin",
        description="Look into the queue, end jobs, drain workers, make API keys, load adapters. "
        "Settings: HEADRACE_* variables.",
    )
    top.set_defaults(json=False)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    commands.add_parser("status", help="lanes, workers, models, dead-letter, server")

    jobs = commands.add_parser("jobs", help="list queued and running jobs")
    _add_pool(jobs)
    jobs.add_argument("--lane", choices=LANES)
    jobs.add_argument("--state", choices=("queued", "running"))
    _add_limit(jobs)

    show = commands.add_parser("show", help="tell all about a job but its prompt")
    show.add_argument("job", metavar="JOB")

    cancel = commands.add_parser("cancel", help="end a job in any state")
    cancel.add_argument("job", metavar="JOB")

    drain = commands.add_parser("drain", help="have a worker finish and leave")
    drain.add_argument("worker", metavar="WORKER")
    drain.add_argument(
        "--wait",
        type=_seconds,
        default=150.0,
        metavar="S",
        help="longest wait until it has left (default %(default).0f; 0: only ask)",
    )
    _add_dead(commands.add_parser("dead", help="jobs that cost too many workers"))
    _add_keys(commands.add_parser("keys", help="API keys"))
    _add_lora(commands.add_parser("lora", help="adapters of a model, on all its workers"))
    return top


def _add_dead(dead: argparse.ArgumentParser) -> None:
    commands = dead.add_subparsers(dest="dead_command", required=True, metavar="COMMAND")

    listing = commands.add_parser("list", help="list them")
    _add_pool(listing)
    _add_limit(listing)

    show = commands.add_parser("show", help="tell all about one but its prompt")
    show.add_argument("job", metavar="JOB")

    requeue = commands.add_parser("requeue", help="submit one again, under a new id")
    requeue.add_argument("job", metavar="JOB")
    requeue.add_argument(
        "--timeout",
        type=_timeout,
        default=600.0,
        metavar="S",
        help="time limit of the new job, queueing included (default %(default).0f)",
    )

    purge = commands.add_parser("purge", help="forget one, or all")
    which = purge.add_mutually_exclusive_group(required=True)
    which.add_argument("job", metavar="JOB", nargs="?")
    which.add_argument("--all", action="store_true", help="all of them")
    which.add_argument("--pool", help="all of this pool's")


def _add_keys(keys: argparse.ArgumentParser) -> None:
    commands = keys.add_subparsers(dest="keys_command", required=True, metavar="COMMAND")

    create = commands.add_parser("create", help="make one, and show its secret, once")
    create.add_argument("name", metavar="NAME", type=_name, help="for people")
    create.add_argument("--tenant", type=_name, help="whose it is (default: NAME)")
    _add_rights(create)
    create.set_defaults(models=[], highest_lane=LANES[0])
    create.set_defaults(**dict.fromkeys(KEY_LIMITS, 0))

    edit = commands.add_parser("edit", help="change what one may, not its secret")
    edit.add_argument("key", metavar="KEY", type=_key, help="its id")
    edit.add_argument("--name", type=_name, help="for people")
    _add_rights(edit)

    create.add_argument(
        "--weight",
        type=_weight,
        default=1.0,
        metavar="W",
        help="its tenant's share of a lane, beside other tenants' (default %(default).0f)",
    )

    commands.add_parser("list", help="list them")
    for name, what in (
        ("show", "tell all about one but its secret"),
        ("disable", "have it refused"),
        ("enable", "have it taken again"),
        ("rotate", "give it a new secret, and show that, once"),
        ("delete", "forget it"),
    ):
        command = commands.add_parser(name, help=what)
        command.add_argument("key", metavar="KEY", type=_key, help="its id")
        if name == "rotate":
            command.add_argument(
                "--grace",
                type=_grace,
                default=86_400.0,
                metavar="S",
                help="how long the old secret stays valid (default %(default).0f; 0: not at all)",
            )


def _add_rights(command: argparse.ArgumentParser) -> None:
    """Add what a key may. An option that isn't given is None, unless the command says otherwise."""
    command.add_argument(
        "--models", type=_models, metavar="A,B", help="what it may use (empty: all)"
    )
    command.add_argument("--lane", choices=LANES, help="of requests that ask for none")
    command.add_argument("--highest-lane", choices=LANES, help="it may ask for")
    command.add_argument(
        "--on-disconnect",
        type=_policy,
        metavar="POLICY",
        help="cancel, continue, grace=<seconds> or default (as the gateway does it)",
    )
    for name, (most, what) in KEY_LIMITS.items():
        command.add_argument(
            f"--{name.replace('_', '-')}",
            type=partial(_bound, most=most),
            metavar="N",
            help=f"{what}, up to {most} (0: no limit of its own)",
        )


def _add_lora(lora: argparse.ArgumentParser) -> None:
    commands = lora.add_subparsers(dest="lora_command", required=True, metavar="COMMAND")
    load = commands.add_parser("load", help="have all workers load one, also those to come")
    unload = commands.add_parser("unload", help="have all workers unload one")
    listing = commands.add_parser("list", help="list them, by worker")
    for command in (load, unload, listing):
        command.add_argument("model", metavar="MODEL", help="a model that the workers serve")
    for command in (load, unload):
        command.add_argument("name", metavar="NAME", type=_adapter, help="what requests call it")
    load.add_argument(
        "source", metavar="SOURCE", type=_source, help="an absolute path, or OWNER/NAME at the hub"
    )
    for command in (load, unload):
        command.add_argument(
            "--wait",
            type=_seconds,
            default=120.0,
            metavar="S",
            help="longest wait for the workers (default %(default).0f)",
        )


def _add_pool(command: argparse.ArgumentParser) -> None:
    command.add_argument("--pool", help="only this pool's")


def _add_limit(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--limit",
        type=_limit,
        default=50,
        metavar="N",
        help="most jobs to list (default %(default)d)",
    )


def _limit(text: str) -> int:
    number = int(text)
    if not 1 <= number <= _MOST:
        raise argparse.ArgumentTypeError(f"must be from 1 to {_MOST}")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 86_400:
        raise argparse.ArgumentTypeError("must be from 0 to 86400")
    return number


def _timeout(text: str) -> float:
    number = _seconds(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _grace(text: str) -> float:
    number = float(text)
    if not 0 <= number <= _LONGEST_GRACE_S:
        raise argparse.ArgumentTypeError(f"must be from 0 to {_LONGEST_GRACE_S}")
    return number


def _bound(text: str, *, most: int) -> int:
    number = int(text)
    if not 0 <= number <= most:
        raise argparse.ArgumentTypeError(f"must be from 0 to {most}")
    return number


def _weight(text: str) -> float:
    value = float(text)
    if not LEAST_WEIGHT <= value <= MOST_WEIGHT:
        raise argparse.ArgumentTypeError(f"must be from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}")
    return value


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError("must be 1 to 64 letters, digits or `_.@-`")
    return text


def _adapter(text: str) -> str:
    if not _ADAPTER.fullmatch(text):
        raise argparse.ArgumentTypeError("must be 1 to 128 letters, digits or `_.:@/-`")
    return text


def _source(text: str) -> str:
    if not _SOURCE.fullmatch(text):
        raise argparse.ArgumentTypeError("must be an absolute path or OWNER/NAME")
    return text


def _key(text: str) -> str:
    # Not the text: somebody may have given the secret.
    if not is_key_id(text):
        raise argparse.ArgumentTypeError("must be a key's id, 12 hexadecimal digits")
    return text


def _models(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) > _MOST_MODELS or not all(map(_MODEL.fullmatch, names)):
        raise argparse.ArgumentTypeError(f"must be up to {_MOST_MODELS} names of models")
    return names


def _policy(text: str) -> str:
    if text == "default":
        return ""
    if not _POLICY.fullmatch(text):
        raise argparse.ArgumentTypeError(
            "must be `cancel`, `continue`, `grace=<seconds>` or `default`"
        )
    return text
