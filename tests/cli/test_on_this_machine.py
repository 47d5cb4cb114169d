"""What the options and the settings of `millrace up` and `millrace proxy` make of a stack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millrace.cli.main import app

SETTINGS = """
[proxy]
host = "127.0.0.2"
port = 9001

[store]
url = "redis://127.0.0.1:9"

[files]
url = "memory://files"

[engine]
threads = 3
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "settings.toml"
    path.write_text(SETTINGS)
    return str(path)


def given(monkeypatch: pytest.MonkeyPatch, target: str, *arguments: str) -> Any:
    """Runs a command up to the call of `target`; returns its first argument."""
    calls = []

    async def called(first: Any, *_: Any, **__: Any) -> None:
        calls.append(first)

    monkeypatch.setattr(target, called)
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == 0, done.output
    (first,) = calls
    return first


def up(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[Any, ...]:
    made = given(monkeypatch, "millrace.local.up.run_until_stopped", "up", *arguments)
    return made.host, made.port, made.redis, made.files, made.threads


def test_up_is_on_this_machine_with_its_own_stores_by_default(monkeypatch):
    assert up(monkeypatch) == ("127.0.0.1", 8080, "", "", 0)


def test_up_does_what_its_config_file_says(monkeypatch, config):
    assert up(monkeypatch, "--config", config) == (
        *("127.0.0.2", 9001, "redis://127.0.0.1:9", "memory://files", 3),
    )


def test_options_of_up_win_over_its_config_file(monkeypatch, config):
    options = ("--host", "127.0.0.3", "--port", "0", "--redis", "unix:///r", "--threads", "1")
    assert up(monkeypatch, "--config", config, *options) == (
        *("127.0.0.3", 0, "unix:///r", "memory://files", 1),
    )


def test_the_port_of_metrics_is_that_of_the_first_service(monkeypatch):
    arguments = ("up", "--set", "telemetry.metrics_port=9090")
    assert (
        given(monkeypatch, "millrace.local.up.run_until_stopped", *arguments).metrics_port == 9090
    )


def test_settings_of_up_are_those_of_a_config_file(monkeypatch):
    settings = ("proxy.port=9002", "engine.threads=2", "store.url=unix:///s", "files.url=none")
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    assert up(monkeypatch, *arguments) == ("127.0.0.1", 9002, "unix:///s", "none", 2)


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        ((), ("127.0.0.2", 9001)),
        (("--port", "0"), ("127.0.0.2", 0)),
        (("--host", "::1", "--set", "proxy.port=9002"), ("::1", 9002)),
    ],
)
def test_the_proxy_listens_where_its_config_file_says(monkeypatch, config, arguments, address):
    options = ("proxy", "--model", "m", "--config", config, *arguments)
    made = given(monkeypatch, "millrace.proxy.main.serve", *options)
    assert (made.proxy.host, made.proxy.port) == address
