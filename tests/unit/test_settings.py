"""Settings: read from variables, checked, and a wrong one named."""

from __future__ import annotations

import pytest

from gateway.settings import GatewaySettings
from shared.settings import RedisSettings, read
from worker.engine.simulated import SimulatedSettings
from worker.settings import WorkerSettings


def _failure(capsys: pytest.CaptureFixture[str], settings: type[RedisSettings]) -> str:
    with pytest.raises(SystemExit) as leaving:
        read(settings)
    assert leaving.value.code == 2
    return capsys.readouterr().err


def test_variables_are_read_with_their_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_REDIS_URL", "unix:///run/redis.sock")
    monkeypatch.setenv("HEADRACE_LEASE_S", "5.5")
    monkeypatch.setenv("LEASE_S", "9")
    settings = read(WorkerSettings)
    assert settings.redis_url.get_secret_value() == "unix:///run/redis.sock"
    assert settings.lease_s == 5.5


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HEADRACE_REDIS_URL", "http://127.0.0.1"),
        ("HEADRACE_REDIS_TIMEOUT_S", "0"),
        ("HEADRACE_REDIS_TIMEOUT_S", "soon"),
        ("HEADRACE_REDIS_CONNECTIONS", "3"),
        ("HEADRACE_KEY_PREFIX", "a{b}"),
        ("HEADRACE_KEY_PREFIX", ""),
        ("HEADRACE_RESULT_TTL_S", "90000"),
        ("HEADRACE_LOG_FORMAT", "xml"),
        ("HEADRACE_LOG_LEVEL", "verbose"),
        ("HEADRACE_ENGINE", "tgi"),
        ("HEADRACE_WORKER_ID", "a b"),
        ("HEADRACE_INTERACTIVE_RESERVE", "1.5"),
        ("HEADRACE_KV_HIGH", "0"),
        ("HEADRACE_DEFAULT_MAX_TOKENS", "0"),
        ("HEADRACE_BEAT_S", "-1"),
        ("HEADRACE_BEAT_S", "86401"),
        ("HEADRACE_METRICS_PORT", "70000"),
        ("HEADRACE_METRICS_HOST", ""),
    ],
)
def test_a_wrong_value_stops_the_start_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
) -> None:
    monkeypatch.setenv(variable, value)
    assert f"headrace: wrong setting {variable}: " in _failure(capsys, WorkerSettings)


def test_each_wrong_variable_gets_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_BEAT_S", "x")
    monkeypatch.setenv("HEADRACE_STALL_S", "y")
    lines = _failure(capsys, WorkerSettings).splitlines()
    assert [line.split(":")[1] for line in lines] == [
        " wrong setting HEADRACE_BEAT_S",
        " wrong setting HEADRACE_STALL_S",
    ]


def test_an_empty_host_is_not_taken_for_every_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_HOST", "")
    assert "headrace: wrong setting HEADRACE_HOST: " in _failure(capsys, GatewaySettings)


def test_settings_that_do_not_go_together_are_both_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_REQUEST_TIMEOUT_S", "5000")
    told = _failure(capsys, GatewaySettings)
    assert "HEADRACE_REQUEST_TIMEOUT_S" in told
    assert "HEADRACE_MAX_REQUEST_TIMEOUT_S" in told
    assert "HEADRACE_:" not in told


def test_the_password_is_in_no_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_REDIS_URL", "rediss://user:hunter2@redis:6379")
    assert "hunter2" not in repr(read(RedisSettings))
    monkeypatch.setenv("HEADRACE_REDIS_URL", "https://user:hunter2@redis:6379")
    assert "hunter2" not in _failure(capsys, RedisSettings)


def test_each_worker_has_an_id_of_its_own() -> None:
    assert WorkerSettings().worker_id != WorkerSettings().worker_id


def test_the_simulated_engine_has_its_own_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_SIMULATED_SEATS", "3")
    monkeypatch.setenv("HEADRACE_SIMULATED_MODELS", "a, b")
    settings = read(SimulatedSettings)
    assert (settings.seats, settings.models) == (3, ("a", "b"))


def test_a_lease_bears_the_loss_of_a_beat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_LEASE_S", "3")
    monkeypatch.setenv("HEADRACE_BEAT_S", "1.6")
    told = _failure(capsys, WorkerSettings)
    assert "HEADRACE_BEAT_S must be at most half of HEADRACE_LEASE_S" in told
