"""The command line of `headrace-admin`."""

from __future__ import annotations

import argparse
from typing import Any

from shared.keys import LANES

_MOST = 100_000
"""Highest `--limit`."""


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
        description="Look into the queue, end jobs, drain workers. Settings: HEADRACE_* variables.",
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
