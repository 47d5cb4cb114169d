"""Values that several commands check alike."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from millrace.cli import options as of

APP = typer.Typer(rich_markup_mode=None)


@APP.command()
def show(scheduler: of.SchedulerAddress = "127.0.0.1:7070") -> None:
    print(scheduler)


@pytest.mark.parametrize("text", ["[::1]:1", "a.b:65535", "a:1,b:2", "a:1, b:2"])
def test_addresses_of_schedulers(text: str) -> None:
    found = CliRunner().invoke(APP, ["--scheduler", text])
    assert (found.exit_code, found.output) == (0, f"{text}\n")


@pytest.mark.parametrize("text", ["", "a", "a:", ":1", "a:0", "a:65536", "a:x", "a:1,", "a:1,b"])
def test_an_address_without_a_port_is_refused(text: str) -> None:
    found = CliRunner().invoke(APP, ["--scheduler", text])
    assert found.exit_code == 2
    assert "write HOST:PORT, PORT from 1 to 65535" in found.stderr
