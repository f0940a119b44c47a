"""The launcher behind `make demo`, with real processes and the simulated engine."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAST = {"HEADRACE_SIMULATED_TTFT_MS": "1", "HEADRACE_SIMULATED_TPOT_MS": "1"}

pytestmark = pytest.mark.timeout(90)


class Launcher:
    """A started launcher and all that it has printed so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.text = ""

    def read_until(self, pattern: str) -> re.Match[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line
            if found := re.search(pattern, self.text):
                return found
        raise AssertionError(f"{pattern} never came:\n{self.text}")

    def read_rest(self) -> int:
        assert self.process.stdout is not None
        self.text += self.process.stdout.read()
        return self.process.wait(timeout=60)


@contextmanager
def launched(state: Path, *arguments: str, **env: str) -> Iterator[Launcher]:
    command = [sys.executable, "-m", "compose.local", "--engine", "simulated"]
    command += ["--state", str(state), *arguments]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **FAST, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield Launcher(process)
        finally:
            process.kill()
    assert eventually_nothing_of(state), family(state)


def family(state: Path) -> list[str]:
    """List the processes that have the demo's state folder among their arguments or its queue's
    address in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            if str(state).encode() in words and int(entry.name) != os.getpid():
                found.append(f"{entry.name} {words[:80]!r}")
    return found


def eventually_nothing_of(state: Path) -> bool:
    until = time.monotonic() + 5
    while family(state) and time.monotonic() < until:
        time.sleep(0.05)
    return not family(state)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Every process of the demo inherits this mark, by which the test finds what is left of them.
    monkeypatch.setenv("DEMO_STATE_OF_THIS_TEST", str(tmp_path))
    return tmp_path


def test_once_answers_and_ends(state: Path) -> None:
    with launched(state, "--once", "--workers", "2", "--gateways", "2") as demo:
        assert demo.read_rest() == 0, demo.text
    assert "> What is the capital of France?" in demo.text
    assert re.search(r"\(\d+ tokens, the first after", demo.text)
    for name in ("valkey", "gateway-1", "gateway-2", "worker-1", "worker-2"):
        assert f"\n{name:<9}|" in demo.text
    assert demo.text.rstrip().endswith("stopped")
    assert "killed" not in demo.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_serves_until_it_is_stopped(state: Path, number: int) -> None:
    with launched(state) as demo:
        base = demo.read_until(r"Ready: (\S+),.*(?s:.*)Ctrl-C stops it").group(1)
        with urllib.request.urlopen(f"{base}/models", timeout=5) as response:
            assert b"simulated" in response.read()
        demo.process.send_signal(number)
        assert demo.read_rest() == 0, demo.text
    assert "killed" not in demo.text


def test_killed_launcher_leaves_nothing_behind(state: Path) -> None:
    with launched(state) as demo:
        demo.read_until("Ctrl-C stops it")
        demo.process.kill()
        demo.process.wait()
        # `launched` looks for what is left.


def test_stop_before_it_is_ready(state: Path) -> None:
    with launched(state, HEADRACE_SIMULATED_LOAD_S="60") as demo:
        demo.read_until("worker.starting")
        demo.process.send_signal(signal.SIGINT)
        assert demo.read_rest() == 130, demo.text


@pytest.mark.parametrize(
    "wrong", ["HEADRACE_SIMULATED_SEATS", "HEADRACE_SIMULATED_KV_TOKENS"], ids=["setting", "engine"]
)
def test_process_that_dies_early_ends_the_demo_with_its_last_words(state: Path, wrong: str) -> None:
    value = "0" if wrong.endswith("SEATS") else "2"
    with launched(state, "--once", **{wrong: value}) as demo:
        assert demo.read_rest() == 1, demo.text
    assert wrong in demo.text.split("failed: worker ended with exit code", 1)[1]


def test_loss_of_one_worker_of_two_is_borne_and_of_the_last_is_not(state: Path) -> None:
    with launched(state, "--workers", "2") as demo:
        demo.read_until("Ctrl-C stops it")
        workers = [
            int(entry.name) for entry in Path("/proc").glob("[0-9]*") if is_worker(entry, state)
        ]
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        demo.read_until("killed by signal 9; the other workers go on")
        assert demo.process.poll() is None
        os.kill(workers[1], signal.SIGKILL)
        assert demo.read_rest() == 1, demo.text


def is_worker(entry: Path, state: Path) -> bool:
    with suppress(OSError):
        words = (entry / "cmdline").read_bytes().split(b"\0")
        mark = str(state).encode() in (entry / "environ").read_bytes()
        return mark and words[1:3] == [b"-m", b"worker"]
    return False


def test_second_demo_in_the_same_folder_is_refused(state: Path) -> None:
    with launched(state) as demo:
        demo.read_until("Ctrl-C stops it")
        with launched(state, "--once") as second:
            assert second.read_rest() != 0
            assert "already" in second.text
            second.process.wait()
            demo.process.send_signal(signal.SIGTERM)
            demo.read_rest()


def test_usual_ports_that_are_taken_are_passed_over_but_not_the_one_asked_for(state: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = str(listener.getsockname()[1])
        with launched(state, "--once", "--port", taken) as demo:
            assert demo.read_rest() == 1, demo.text
    assert f"port {taken}" in demo.text.split("failed: ", 1)[1]


def test_reader_that_goes_away_stops_it(state: Path) -> None:
    with launched(state) as demo:
        demo.read_until("Ctrl-C stops it")
        assert demo.process.stdout is not None
        demo.process.stdout.close()
        assert demo.process.wait(timeout=60) == 0
