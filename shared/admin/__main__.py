"""`headrace-admin [--json] COMMAND`.

Exit codes: 0 done, 1 not found or refused, 2 wrong usage or setting, 3 the queue can't be reached.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from enum import IntEnum

import msgspec

from shared.admin import dead, jobs, keys, lora, text
from shared.admin.access import Access, Refused
from shared.admin.arguments import parser
from shared.admin.documents import AdapterChange, Drained, Error, Record
from shared.admin.drain import drain
from shared.admin.layout import clean
from shared.admin.settings import AdminSettings
from shared.admin.status import status
from shared.connection import reason
from shared.errors import HeadraceError, QueueFull, QueueUnavailable
from shared.servers import parse
from shared.settings import read


class Exit(IntEnum):
    """What the process says to whoever started it."""

    OK = 0
    REFUSED = 1
    USAGE = 2
    UNREACHABLE = 3
    INTERRUPTED = 130


class Failure(Record, frozen=True, kw_only=True):
    """The document of a command that failed."""

    error: Error


async def carry_out(access: Access, args: argparse.Namespace) -> Record:
    """Carry out the command and return its answer. Raises `Refused`, `HeadraceError`."""
    match args.command:
        case "status":
            return await status(access)
        case "jobs":
            return await jobs.jobs(
                access, pool=args.pool, lane=args.lane, state=args.state, limit=args.limit
            )
        case "show":
            return await jobs.show(access, args.job)
        case "cancel":
            return await jobs.cancel(access, args.job)
        case "drain":
            return await drain(access, args.worker, args.wait)
        case "keys":
            return await _keys(access, args)
        case "lora":
            return await _lora(access, args)
    return await _dead(access, args)


async def _dead(access: Access, args: argparse.Namespace) -> Record:
    match args.dead_command:
        case "list":
            return await dead.listing(access, pool=args.pool, limit=args.limit)
        case "show":
            return await dead.show(access, args.job)
        case "requeue":
            return await dead.requeue(access, args.job, args.timeout)
    return await dead.purge(access, args.job, pool=args.pool)


async def _keys(access: Access, args: argparse.Namespace) -> Record:
    match args.keys_command:
        case "create":
            return await keys.create(access, args)
        case "list":
            return await keys.listing(access)
        case "edit":
            return await keys.edit(access, args)
        case "show":
            return await keys.show(access, args.key)
        case "rotate":
            return await keys.rotate(access, args.key, args.grace)
        case "delete":
            return await keys.delete(access, args.key)
    return await keys.disable(access, args.key, disabled=args.keys_command == "disable")


async def _lora(access: Access, args: argparse.Namespace) -> Record:
    match args.lora_command:
        case "load":
            return await lora.load(access, args.model, args.name, args.source, args.wait)
        case "unload":
            return await lora.unload(access, args.model, args.name, args.wait)
    return await lora.listing(access, args.model)


def exit_code(answer: Record, args: argparse.Namespace) -> Exit:
    """Return what an answer means: what was waited for must have come about."""
    if isinstance(answer, AdapterChange):
        return Exit.REFUSED if answer.outcome in ("failed", "timed_out") else Exit.OK
    if not isinstance(answer, Drained) or answer.outcome == "left":
        return Exit.OK
    return Exit.OK if answer.outcome == "draining" and args.wait == 0 else Exit.REFUSED


async def run(settings: AdminSettings, args: argparse.Namespace) -> Exit:
    """Carry out the command and write its answer, or why there is none."""
    try:
        async with Access(settings) as access:
            answer = await carry_out(access, args)
    except Refused as error:
        return _fail(args, Exit.REFUSED, error.code, str(error))
    except QueueFull as error:
        return _fail(args, Exit.REFUSED, error.code, error.message)
    except QueueUnavailable as error:
        return _fail(args, Exit.UNREACHABLE, error.code, _unreachable(settings, error))
    _write(_json(answer) if args.json else text.render(answer))
    return exit_code(answer, args)


def _fail(args: argparse.Namespace, code: Exit, error_code: str, message: str) -> Exit:
    if args.json:
        _write(_json(Failure(error=Error(code=error_code, message=message))))
    sys.stderr.write(f"headrace-admin: {clean(message)}\n")
    return code


def _unreachable(settings: AdminSettings, error: HeadraceError) -> str:
    """Say which server, without its password, and what the driver said of it."""
    place = parse(settings.redis_url.get_secret_value())
    return f"the queue at {place} cannot be used: {reason(error)}"


def _json(document: Record) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def _write(answer: str) -> None:
    try:
        sys.stdout.write(answer)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, `head` perhaps, has had enough. Nothing is left to be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> Exit:
    """Parse, connect, carry out; return the exit code."""
    args = parser().parse_args(argv)
    settings = read(AdminSettings)
    try:
        return asyncio.run(run(settings, args))
    except KeyboardInterrupt:
        return Exit.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
