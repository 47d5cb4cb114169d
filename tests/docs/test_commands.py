"""The commands and settings that pages print exist: names of commands, options and settings."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docs.reference.generate import command_tree

from millrace.core.config import settings

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
PAGES = sorted(str(page.relative_to(ROOT)) for page in WRITTEN)
FENCE = re.compile(r"(?ms)^ *```[a-z]*\n(.*?)^ *```$")
SPAN = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(r"(?:\.venv/bin/)?millrace ((?:[a-z-]+ ?)+.*)")
COMMANDS: Any = command_tree()
SETTINGS = {f"{one.section}.{one.name}" for one in settings()}
#: Names of the same form: files, modules and values of the chart.
OTHERS = {
    *("scheduler.log", "tls.crt", "tls.key", "engine.step_in_flight"),
    *("scheduler.replicas", "scheduler.template"),
}
#: The pages of the chart's values and the custom resources have sections of these names, too.
OTHER_TREES = {"docs/reference/values.md", "docs/reference/crds.md"}
SECTIONS = {one.section for one in settings()}
#: `scheduler.tasks_ahead=1`, as a span of code or after `--set`.
SETTING = re.compile(r"(?:--set |^)(([a-z]+)\.[a-z][a-z0-9_]*)(?:=|$)")


def _printed(text: str) -> Iterator[str]:
    """Yields the lines of fenced code, continued lines as one, and the spans of code."""
    for block in FENCE.findall(text):
        yield from block.replace("\\\n", " ").splitlines()
    yield from SPAN.findall(FENCE.sub("", text))


def _commands(text: str) -> Iterator[list[str]]:
    """Yields the words after `millrace` of each command."""
    for line in _printed(text):
        said = line.strip().removeprefix("$ ")
        if found := COMMAND.match(re.split(r"\s[#|&>]|;", said)[0].strip()):
            try:
                yield shlex.split(found[1])
            except ValueError:
                yield found[1].split()


def _unknown(words: list[str]) -> Iterator[str]:
    """Yields what the command line does not know."""
    at = COMMANDS
    while words and hasattr(at, "commands") and not words[0].startswith("-"):
        if (name := words[0]) not in at.commands:
            yield f"no command {name!r} of `{at.name}`"
            return
        at, words = at.commands[name], words[1:]
    known = {option for one in at.params for option in (*one.opts, *one.secondary_opts)}
    for word in words:
        option = word.split("=")[0]
        if option.startswith("--") and option not in {*known, "--help", "--"}:
            yield f"`{at.name}` has no option {option}"


@pytest.mark.parametrize("name", PAGES)
def test_every_command_of_the_page_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not [one for words in _commands(text) for one in _unknown(words)]


@pytest.mark.parametrize("name", [name for name in PAGES if name not in OTHER_TREES])
def test_every_setting_of_the_page_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    said = {found for line in _printed(text) for found in SETTING.findall(line)}
    missing = {one for one, section in said if section in SECTIONS} - SETTINGS - OTHERS
    assert not missing


def test_a_wrong_command_would_be_found() -> None:
    text = (
        "`millrace fleet --schedular a`\n```\n$ millrace sim \\\n  runs --mix qwen # twice\n```\n"
    )
    found = [one for words in _commands(text) for one in _unknown(words)]
    assert found == ["no command 'runs' of `sim`", "`fleet` has no option --schedular"]
