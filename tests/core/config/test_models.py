"""The file of models: what it may hold, and what its errors name."""

from __future__ import annotations

import pytest

from millrace.core.config import load_config
from millrace.core.config.models import Canary, ModelConfig, models_file, read_models_file
from millrace.core.errors import ConfigError

ONE = '[models.a]\nmodel = "/m/a"\nscheduler = "h:1"\n'
TWO = ONE + '[models.b]\nmodel = "org/b"\nscheduler = "h:2"\n'


def read(text: str) -> list[ModelConfig]:
    return read_models_file(text, load_config())


def test_a_written_file_is_read_as_it_was() -> None:
    models = [
        ModelConfig(
            name='Qwen/2.5 "7B"',
            model="/models/a\\b",
            scheduler="a:7070",
            aliases=("gpt-4o-mini", "é\x7f"),
            canary=Canary(model="next", percent=2.5),
            settings={"proxy.tool_parser": "hermes", "engine.page_tokens": "32"},
        ),
        ModelConfig(name="next", model="org/next", scheduler="b:7070"),
    ]
    assert read(models_file(models)) == models


def test_a_model_has_the_proxys_settings_but_for_its_own() -> None:
    [model] = read(
        ONE + '[models.a.settings]\n"proxy.max_new_tokens" = 7\n"engine.page_tokens" = "32"\n'
    )
    own = model.config(load_config(overrides=["proxy.max_choices=3", "proxy.max_new_tokens=9"]))
    assert (own.proxy.max_choices, own.proxy.max_new_tokens) == (3, 7)
    assert own.engine.page_tokens == 32


def test_other_names_and_another_canary_need_no_other_parts() -> None:
    [before, _] = read(TWO)
    named = read(TWO.replace('"h:1"\n', '"h:1"\naliases = ["x"]\ncanary = {model="b",percent=1}\n'))
    assert before.same_parts(named[0])
    moved = read(TWO.replace("h:1", "h:3"))
    assert not before.same_parts(moved[0])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "models is {}"),
        ("[models", "no TOML"),
        ("[model.a]", "unknown section 'model'"),
        ("models = 3", "models is 3"),
        ("[models]\na = 3", "models.a is 3"),
        ('[models.a]\nscheduler = "h:1"', "models.a.model is None"),
        ('[models.a]\nmodel = "m"\nscheduler = ""', "models.a.scheduler is ''"),
        (ONE + "name = 'x'", "unknown field models.a.name"),
        (ONE + 'aliases = "x"', "models.a.aliases is 'x'"),
        (ONE + 'aliases = ["a"]', "models.a.aliases has 'a', which is a name of models.a"),
        (TWO + 'aliases = ["a"]', "models.b.aliases has 'a', which is a name of models.a"),
        (ONE + 'canary = {model = "a", percent = 5}', "models.a.canary.model is 'a'"),
        (TWO + 'canary = {model = "c", percent = 5}', "another model of the file: a"),
        (TWO + 'canary = {model = "a", percent = 101}', "models.b.canary.percent is 101"),
        (TWO + 'canary = {model = "a", percent = true}', "models.b.canary.percent is True"),
        (TWO + 'canary = {model = "a", share = 1}', "unknown field models.b.canary.share"),
        (ONE + 'settings = {"proxy.port" = 1}', "models.a.settings has 'proxy.port'"),
        (
            ONE + 'settings = {"proxy.max_choices" = 0}',
            "models.a.settings: proxy.max_choices is 0; it must be between 1 and 1024",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_field_and_value(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(text)
    assert named in str(error.value)
