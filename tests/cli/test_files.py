"""Paths on the command line are checked before a command begins, and named when they are wrong."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import typer

from millrace.cli.main import BENCHMARKS, app
from millrace.cli.sim.command import register
from millrace.file_options import WRITE
from support.command import millrace

#: What a command makes with its folder.
MADE = {("compare", "board"), ("profile", "out"), ("redis-acl", "folder")}


def paths() -> Iterator[tuple[str, str, typer.models.ParameterInfo]]:
    """Yields command, parameter and declaration of everything that takes a path."""
    sim, bench = typer.Typer(), typer.Typer()
    register(sim)
    for name in BENCHMARKS:
        bench.command(name)(importlib.import_module(f"millrace.bench.{name}.command").command)
    for one in (*app.registered_commands, *sim.registered_commands, *bench.registered_commands):
        for name, parameter in inspect.signature(one.callback, eval_str=True).parameters.items():
            kind, *declared = get_args(parameter.annotation) or (None,)
            if kind is Path or Path in get_args(kind):
                yield str(one.name), name, declared[0]


def test_every_path_is_one_to_read_or_one_to_write() -> None:
    unchecked = {
        (command, name)
        for command, name, declared in paths()
        if not declared.exists and declared.callback is not WRITE["callback"]
    }
    assert unchecked == MADE


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("report /nowhere.jsonl", "'FILE': file '/nowhere.jsonl' does not exist."),
        ("report /", "'FILE': file '/' is a directory."),
        ("explain ID --recording /nowhere", "'--recording': file '/nowhere' does not exist."),
        ("up --config /nowhere.toml", "'--config': file '/nowhere.toml' does not exist."),
        ("bench transfer --json /nowhere/a.json", "'--json': There is no folder '/nowhere'."),
        ("sim run --mix qwen --plot /nowhere/a.png", "'--plot': There is no folder '/nowhere'."),
        ("bench serve --trace /nowhere", "'--trace': file '/nowhere' does not exist."),
        ("sim run --trace nowhere.csv", "'--trace': file 'nowhere.csv' does not exist."),
        ("policy edf --json /", "'--json': file '/' is a directory."),
    ],
)
async def test_a_wrong_path_is_named_with_its_option(words: str, said: str) -> None:
    status, shown = await millrace(*words.split())
    assert status == 2
    assert f"Error: Invalid value for {said}" in shown


async def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(bytes(range(256)))
    for command in ("report", "sim replay", "board"):
        status, shown = await millrace(*command.split(), str(path))
        assert status == 1
        assert shown.startswith(f"millrace: {path}")
        assert shown.count("\n") == 1
