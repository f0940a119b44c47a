"""The container files: valid for Docker Compose, and in agreement with the code's settings."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from compose.pool import valkey_server
from gateway.metrics import Metrics
from gateway.settings import GatewaySettings
from shared.keys import Keys, tag
from worker.engine.simulated import SimulatedSettings
from worker.metrics import WorkerMetrics
from worker.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
FILES = ROOT / "compose"
OVERRIDES = {"simulated": [], "vllm-cpu": ["compose.cpu.yaml"], "vllm": ["compose.gpu.yaml"]}


def compose_command() -> list[str]:
    """Return Docker Compose: the wheel's (a program in a package called compose), or Docker's."""
    for folder in sys.path:
        program = Path(folder) / "compose" / "docker-compose"
        if program.is_file():
            return [str(program)]
    if shutil.which("docker"):
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True)
        if plugin.returncode == 0:
            return ["docker", "compose"]
    if (sys.platform, platform.machine()) == ("linux", "x86_64"):
        pytest.fail("no Docker Compose: pip install -e '.[dev]'")
    pytest.skip("no Docker Compose, and its wheel isn't for this machine")


@cache
def config(variant: str, env_file: Path = Path(os.devnull)) -> dict[str, Any]:
    """Return what Docker Compose makes of the files, nothing coming from the environment."""
    command = [*compose_command(), "--env-file", str(env_file)]
    for file in ["compose.yaml", *OVERRIDES[variant]]:
        command += ["-f", str(FILES / file)]
    command += ["config", "--format", "json"]
    env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "level=warning" not in done.stderr, done.stderr
    merged: dict[str, Any] = json.loads(done.stdout)
    return merged


def seconds(text: str) -> int:
    """Read a duration as Compose writes it: `2m30s`."""
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    assert parts is not None, text
    hours, minutes, rest = (int(part or 0) for part in parts.groups())
    return 3600 * hours + 60 * minutes + rest


@pytest.mark.parametrize("variant", OVERRIDES)
def test_every_combination_is_valid(variant: str) -> None:
    services = config(variant)["services"]
    assert set(services) == {"redis", "gateway", "proxy", "worker", "prometheus"}
    worker = services["worker"]
    assert worker["build"]["args"]["VARIANT"] == variant
    assert worker["image"] == f"headrace-worker:{variant}"
    engine = "simulated" if variant == "simulated" else "vllm"
    assert worker["environment"]["HEADRACE_ENGINE"] == engine
    assert bool(worker.get("command")) == (engine == "vllm")


@pytest.mark.parametrize("variant", OVERRIDES)
def test_gateways_and_workers_can_be_scaled(variant: str) -> None:
    for name in ("gateway", "worker"):
        service = config(variant)["services"][name]
        assert "container_name" not in service
        assert "ports" not in service, "a second container could not have the same port"


def test_nobody_is_served_without_a_key_unless_a_person_says_so(tmp_path: Path) -> None:
    assert config("vllm")["services"]["gateway"]["environment"]["HEADRACE_AUTH"] == "keys"
    chosen = tmp_path / "chosen.env"
    chosen.write_text("AUTH=open\n")
    gateway = config("vllm", chosen)["services"]["gateway"]
    assert gateway["environment"]["HEADRACE_AUTH"] == "open"


def test_model_and_port_are_the_persons_choice(tmp_path: Path) -> None:
    chosen = tmp_path / "chosen.env"
    chosen.write_text("MODEL=org/other\nPORT=9000\nGPUS=2\n")
    services = config("vllm", chosen)["services"]
    assert services["worker"]["command"][0] == "org/other"
    assert services["proxy"]["ports"][0]["published"] == "9000"
    (device,) = services["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["count"], device["capabilities"]) == (2, ["gpu"])


def test_containers_are_given_longer_than_their_drain() -> None:
    services = config("vllm")["services"]
    gateway_s = GatewaySettings.model_fields["drain_timeout_s"].default
    worker_s = WorkerSettings.model_fields["drain_timeout_s"].default
    assert seconds(services["gateway"]["stop_grace_period"]) > gateway_s + 5
    assert seconds(services["worker"]["stop_grace_period"]) > worker_s + 10
    assert seconds(services["proxy"]["stop_grace_period"]) > gateway_s + 5


@pytest.mark.parametrize("variant", OVERRIDES)
def test_settings_in_the_files_exist(variant: str) -> None:
    services = config(variant)["services"]
    known = {
        "gateway": set(GatewaySettings.model_fields),
        "worker": set(WorkerSettings.model_fields)
        | {f"simulated_{name}" for name in SimulatedSettings.model_fields},
    }
    for name, fields in known.items():
        given = [key for key in services[name]["environment"] if key.startswith("HEADRACE_")]
        assert given
        unknown = [key for key in given if key.removeprefix("HEADRACE_").lower() not in fields]
        assert not unknown


def test_every_file_that_is_mounted_or_built_from_exists() -> None:
    for service in config("vllm")["services"].values():
        if "build" in service:
            build = service["build"]
            assert Path(build["context"]) == ROOT
            dockerfile = ROOT / build["dockerfile"]
            for line in dockerfile.read_text().splitlines():
                if line.startswith("COPY "):
                    for source in line.split()[1:-1]:
                        assert (ROOT / source).exists(), line
        for volume in service.get("volumes", []):
            if volume["type"] == "bind":
                assert Path(volume["source"]).is_file(), volume


def test_images_get_what_they_copy() -> None:
    """`.dockerignore` lets through what the Dockerfiles name, and nothing else."""
    let_through = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = set()
    for dockerfile in FILES.glob("Dockerfile.*"):
        for line in dockerfile.read_text().splitlines():
            if line.startswith("COPY "):
                copied.update(line.split()[1:-1])
    assert copied == let_through


def test_gateways_image_has_neither_worker_nor_engine() -> None:
    dockerfile = (FILES / "Dockerfile.gateway").read_text()
    steps = "\n".join(line for line in dockerfile.splitlines() if not line.startswith("#"))
    assert "vllm" not in steps
    assert "torch" not in steps
    assert "worker" not in steps


def test_prometheus_scrapes_the_ports_on_which_metrics_are_served() -> None:
    services = config("simulated")["services"]
    scraped = dict(
        re.findall(
            r"names: \[(\w+)\]\n\s+type: A\n\s+port: (\d+)", (FILES / "prometheus.yml").read_text()
        )
    )
    assert scraped == {
        "gateway": services["gateway"]["environment"]["HEADRACE_PORT"],
        "worker": services["worker"]["environment"]["HEADRACE_METRICS_PORT"],
    }
    assert services["worker"]["environment"]["HEADRACE_METRICS_HOST"] == "0.0.0.0"


def test_proxy_lets_bodies_and_silences_through_that_the_gateways_allow() -> None:
    nginx = (FILES / "nginx.conf").read_text()
    body = GatewaySettings.model_fields["max_body_bytes"].default
    assert f"client_max_body_size {body >> 20}m;" in nginx
    silence = re.search(r"proxy_read_timeout (\d+)s;", nginx)
    assert silence is not None
    assert int(silence.group(1)) > GatewaySettings.model_fields["max_request_timeout_s"].default
    assert "proxy_buffering off;" in nginx


def test_nginx_accepts_its_configuration(tmp_path: Path) -> None:
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if nginx is None:
        pytest.skip("nginx is not installed")
    own = tmp_path / "nginx.conf"
    text = (FILES / "nginx.conf").read_text()
    text = text.replace("pid /tmp/nginx.pid;", f"pid {tmp_path}/nginx.pid;")
    # The check binds what it would listen on.
    own.write_text(text.replace("listen 8000;", f"listen unix:{tmp_path}/http;"))
    done = subprocess.run([nginx, "-t", "-c", str(own)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_server_takes_its_configuration(tmp_path: Path) -> None:
    """The demo's Valkey and the container's differ in address and folder alone."""
    path = tmp_path / "socket"
    command = [str(valkey_server()), str(FILES / "redis.conf"), "--port", "0"]
    command += ["--unixsocket", str(path), "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            wanted = {"maxmemory-policy": "noeviction", "appendonly": "yes", "save": ""}
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(5)
                for _ in range(100):
                    with suppress(OSError):
                        client.connect(str(path))
                        break
                    time.sleep(0.05)
                client.sendall(f"CONFIG GET {' '.join(wanted)}\r\nQUIT\r\n".encode())
                words = client.makefile("rb").read().decode().split("\r\n")
        finally:
            server.terminate()
    # A flat array: `$<length>`, name, `$<length>`, value.
    told = dict(zip(words[2::4], words[4::4], strict=False))
    assert told == wanted


def test_operations_name_the_stream_that_scaling_looks_at() -> None:
    words = (ROOT / "docs" / "operations.md").read_text()
    stream = Keys().lane(tag("my-model", 0), "interactive")
    assert f'stream: "{stream}"' in words
    assert 'print(Keys().lane(tag("my-model", 0), "interactive"))' in words


def test_operations_speak_of_settings_and_metrics_that_exist() -> None:
    words = (ROOT / "docs" / "operations.md").read_text()
    settings = set(GatewaySettings.model_fields) | set(WorkerSettings.model_fields)
    named = {name.lower() for name in re.findall(r"`(?!OTEL_)([A-Z]+(?:_[A-Z]+)*)`", words)}
    assert named - settings == set()
    registry = CollectorRegistry()
    WorkerMetrics(registry)
    known = {metric.name for r in (registry, Metrics().registry) for metric in r.collect()}
    told = {name.removesuffix("_total") for name in re.findall(r"`(headrace_\w+)", words)}
    assert told - known == set()
