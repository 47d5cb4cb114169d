"""`millrace keys`, as a user types it."""

from __future__ import annotations

import tomllib
from hashlib import sha256

import pytest
import typer
from typer.testing import CliRunner

from millrace.cli.commands.keys import register
from millrace.core.config.tenants import read_keys_file
from millrace.core.errors import ConfigError

app = typer.Typer()
register(app)


@app.callback()
def several() -> None:
    """Makes `keys` a command beside others, as in `millrace`."""


def run(*words: str, stdin: str = "") -> list[str]:
    done = CliRunner().invoke(app, ["keys", *words], input=stdin)
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


def test_a_new_key_is_shown_once_with_a_table_that_can_be_pasted():
    key_line, digest_line, _, *table = run("acme")
    key, digest = key_line.split()[1], digest_line.split()[1]
    assert key.startswith("sk-millrace-") and len(key) == 55
    assert digest == sha256(key.encode()).hexdigest()
    assert read_keys_file("\n".join(table))["acme"].key_sha256 == (digest,)
    assert run("acme")[0] != key_line


@pytest.mark.parametrize("tenant", ["acme", "a b", 'a"b', "é"])
def test_a_key_with_a_name_has_a_table_of_its_own(tenant):
    *_, bracket, name, digest = run(tenant, "--name", "ci")
    text = "\n".join((bracket, name, digest))
    assert list(tomllib.loads(text)["tenants"]) == [tenant]
    [key] = read_keys_file(text)[tenant].keys
    assert key.name == "ci"


def test_the_digest_of_an_existing_key_does_not_show_the_key():
    lines = run("acme", "--stdin", stdin="sk-old\n")
    assert lines[0] == f"sha256  {sha256(b'sk-old').hexdigest()}"
    assert "sk-old" not in "\n".join(lines)


def test_without_a_key_on_standard_input_nothing_is_printed():
    done = CliRunner().invoke(app, ["keys", "acme", "--stdin"], input="\n")
    assert done.exit_code == 2 and "sha256" not in done.output


def test_a_tenant_must_have_a_name():
    done = CliRunner().invoke(app, ["keys", ""])
    assert done.exit_code == 2 and "must have a name" in done.output
    with pytest.raises(ConfigError, match="must have a name"):
        read_keys_file('[tenants.""]\nmodels = "a"')
