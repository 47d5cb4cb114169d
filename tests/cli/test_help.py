"""--help of every command: its text, and that it imports only the options.

The bound is a count of modules: CPU time on a busy machine says little, and follows from it (about
1 ms a module; a `--help` is to cost 300 ms at most).
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer.main

from millrace.cli.main import BENCHMARKS, app
from millrace.cli.sim.command import register

#: Modules that printing options does not need; each import takes from 20 ms to seconds.
BANNED = {
    "asyncio",
    "fastapi",
    "google.protobuf",
    "grpc",
    "httpx",
    "jinja2",
    "matplotlib",
    "multiprocessing",
    "nixl",
    "numpy",
    "openai",
    "opentelemetry",
    "orjson",
    "pydantic",
    "redis",
    "rich",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "uvicorn",
    "uvloop",
}
#: The interpreter and typer import 140; the rest are ours, half of them for the simulator's names.
MOST_MODULES = 280


def _simulator() -> typer.Typer:
    simulator = typer.Typer()
    register(simulator)
    return simulator


COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
SIMULATIONS = sorted(typer.main.get_command(_simulator()).commands)  # type: ignore[attr-defined]
LINES = [
    [],
    *([name] for name in COMMANDS),
    *(["bench", name] for name in BENCHMARKS),
    *(["sim", name] for name in SIMULATIONS),
]

#: Forks for every command line before any import: an interpreter's start takes longer.
_PROGRAM = """
import contextlib, io, json, os, sys

def told(arguments):
    from millrace.cli.main import main
    sys.argv = ["millrace", *arguments]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        try:
            main()
        except SystemExit as ended:
            status = ended.code
    return {"status": status, "help": shown.getvalue(), "modules": sorted(sys.modules)}

for arguments in json.load(sys.stdin):
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        print(json.dumps(told(arguments)), flush=True)
        os._exit(0)
"""


def name_of(words: list[str]) -> str:
    return " ".join(["millrace", *words])


@pytest.fixture(scope="module")
def helps() -> dict[str, dict]:
    """Returns the output and imports of each command's --help, each from its own process."""
    lines = json.dumps([[*words, "--help"] for words in LINES])
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM], input=lines, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    return {name_of(words): one for words, one in zip(LINES, found, strict=True)}


@pytest.mark.parametrize("words", LINES, ids=name_of)
def test_help_loads_only_options(helps, words):
    found = helps[name_of(words)]
    assert found["status"] == 0
    assert found["help"].startswith(" ".join(["Usage: millrace", *words]))
    loaded = {name for name in BANNED if name in found["modules"]}
    assert not loaded, f"--help of {words} loads {sorted(loaded)}"
    assert len(found["modules"]) <= MOST_MODULES


@pytest.mark.parametrize("words", [["up"], ["bench", "serve"], ["sim", "run"], ["bench"]])
def test_help_is_what_the_parser_would_print(helps, words):
    """`show_help` bypasses typer's parser, and must print the same text."""
    found = helps[name_of(words)]
    sim_or_bench = "from millrace.cli.sim.command import register; register(cli.sim)"
    if words[0] == "bench":
        sim_or_bench = f"cli._add_benchmarks({' '.join(words[1:])!r})"
    program = f"from millrace.cli import main as cli; {sim_or_bench}; cli.app(prog_name='millrace')"
    ran = subprocess.run(
        [sys.executable, "-c", program, *words, "--help"], capture_output=True, text=True
    )
    assert ran.stdout == found["help"]


@pytest.mark.parametrize("words", [["no-such-command"], ["sim", "no-such"], ["--no-such", "up"]])
def test_help_of_no_command_is_an_error(words):
    ran = subprocess.run(
        [sys.executable, "-m", "millrace", *words, "--help"],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert "No such" in ran.stderr
