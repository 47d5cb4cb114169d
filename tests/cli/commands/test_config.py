"""The settings page equals the code's output, and the TOML file loads."""

import tomllib
from pathlib import Path

from millrace.cli.commands.config import as_markdown, as_toml
from millrace.core.config import Config, load_config

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "configuration.md"


def test_the_page_in_docs_is_current() -> None:
    assert PAGE.read_text() == as_markdown(), "run `millrace config --markdown`"


def test_the_toml_file_is_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "millrace.toml"
    file.write_text(as_toml())

    assert load_config(file) == Config()
    assert set(tomllib.loads(as_toml())) >= {"proxy", "scheduler", "engine", "transfer", "store"}
