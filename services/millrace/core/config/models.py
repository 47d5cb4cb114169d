"""The models that one proxy serves, and the file that lists several of them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from millrace.core.config import Config, with_settings
from millrace.core.errors import ConfigError

#: The settings that a model of the file may have for itself.
OWN_SETTINGS = (
    "engine.max_context_tokens",
    "engine.page_tokens",
    "engine.prefix_block_tokens",
    "engine.prefix_cache",
    "proxy.max_choices",
    "proxy.max_inflight",
    "proxy.max_logprobs",
    "proxy.max_new_tokens",
    "proxy.max_parked",
    "proxy.park_timeout_s",
    "proxy.pooling",
    "proxy.reasoning_parser",
    "proxy.submit_timeout_s",
    "proxy.tool_parser",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The share of a model's requests, in percent, that another model of the file answers."""

    model: str
    percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model of a proxy.

    `model` is a folder or a hub id, `scheduler` the host:port of its fleet's scheduler. An empty
    `name` stands for the folder's name. `aliases` are further names; `settings` replace values of
    `OWN_SETTINGS`.
    """

    name: str = ""
    model: str
    scheduler: str
    aliases: tuple[str, ...] = ()
    canary: Canary | None = None
    settings: Mapping[str, Any] | None = None

    def config(self, of_proxy: Config) -> Config:
        """Returns the proxy's settings with the model's own. Raises ConfigError."""
        return with_settings(of_proxy, self.settings or {}, f"models.{self.name}.settings")

    def same_parts(self, other: ModelConfig) -> bool:
        """Whether both are served by the same parts: names and canary alone may differ."""
        return replace(self, aliases=(), canary=None) == replace(other, aliases=(), canary=None)


def read_models_file(text: str, config: Config) -> list[ModelConfig]:
    """Builds the models of a file: TOML with the tables `models.NAME` alone, one at least.

    `config` are the settings of the proxy. Raises ConfigError naming the field.
    """
    try:
        tree = tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"no TOML: {error}") from error
    if unknown := tree.keys() - {"models"}:
        raise ConfigError(f"unknown section {min(unknown)!r}; there is models")
    tables = tree.get("models", {})
    if not isinstance(tables, dict) or not tables:
        raise ConfigError(f"models is {tables!r}; it must hold a table for each model")
    found = [_model(name, table) for name, table in tables.items()]
    for one in found:
        one.config(config)
    _check_names(found)
    return found


def models_file(models: Iterable[ModelConfig]) -> str:
    """Returns the text of a file of models."""
    return "\n".join(_table(model) for model in models)


def _table(model: ModelConfig) -> str:
    head = f"models.{_quoted(model.name)}"
    lines = [
        f"[{head}]",
        f"model = {_quoted(model.model)}",
        f"scheduler = {_quoted(model.scheduler)}",
    ]
    if model.aliases:
        lines.append(f"aliases = [{', '.join(map(_quoted, model.aliases))}]")
    if (canary := model.canary) is not None:
        of = f"{{model = {_quoted(canary.model)}, percent = {canary.percent!r}}}"
        lines.append(f"canary = {of}")
    if model.settings:
        lines.append(f"[{head}.settings]")
        lines += [f"{_quoted(k)} = {_quoted(str(v))}" for k, v in model.settings.items()]
    return "".join(f"{line}\n" for line in lines)


def _quoted(value: str) -> str:
    """Quotes a basic string: TOML's escapes are JSON's, but TOML also escapes DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _model(name: str, table: object) -> ModelConfig:
    path = f"models.{name}"
    if not name:
        raise ConfigError("models has a table without a name")
    given = _known(path, table, ModelConfig, but="name")
    settings = given.get("settings", {})
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}.settings is {settings!r}; it must be a table")
    if unknown := settings.keys() - set(OWN_SETTINGS):
        wanted = ", ".join(OWN_SETTINGS)
        raise ConfigError(f"{path}.settings has {min(unknown)!r}; a model may set {wanted}")
    return ModelConfig(
        name=name,
        model=_text(f"{path}.model", given.get("model")),
        scheduler=_text(f"{path}.scheduler", given.get("scheduler")),
        aliases=_aliases(f"{path}.aliases", given.get("aliases", [])),
        canary=_canary(f"{path}.canary", given["canary"]) if "canary" in given else None,
        settings=settings or None,
    )


def _canary(path: str, table: object) -> Canary:
    given = _known(path, table, Canary)
    percent: Any = given.get("percent")
    is_number = isinstance(percent, int | float) and not isinstance(percent, bool)
    if not is_number or not 0 <= percent <= 100:
        raise ConfigError(f"{path}.percent is {percent!r}; it must be a number from 0 to 100")
    return Canary(model=_text(f"{path}.model", given.get("model")), percent=float(percent))


def _known(
    path: str, table: object, record: type[ModelConfig | Canary], but: str = ""
) -> dict[str, Any]:
    """Returns a table that has fields of `record` alone, without the field `but`."""
    known = [field.name for field in fields(record) if field.name != but]
    if not isinstance(table, dict):
        raise ConfigError(f"{path} is {table!r}; it must be a table")
    if unknown := table.keys() - set(known):
        raise ConfigError(f"unknown field {path}.{min(unknown)}; there are {', '.join(known)}")
    return table


def _text(path: str, value: object) -> str:
    if isinstance(value, str) and value:
        return value
    raise ConfigError(f"{path} is {value!r}; it must be a text that is not empty")


def _aliases(path: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise ConfigError(f"{path} is {value!r}; it must be a list of names")
    return tuple(value)


def _check_names(models: list[ModelConfig]) -> None:
    """Raises ConfigError for a name of two models, and for a canary that is no other model."""
    owners = {one.name: one.name for one in models}
    for one in models:
        for alias in one.aliases:
            if (owner := owners.setdefault(alias, one.name)) != one.name or alias == one.name:
                raise ConfigError(
                    f"models.{one.name}.aliases has {alias!r}, which is a name of models.{owner}"
                )
    names = {one.name for one in models}
    for one in models:
        if one.canary is not None and one.canary.model not in names - {one.name}:
            raise ConfigError(
                f"models.{one.name}.canary.model is {one.canary.model!r}; it must be another "
                f"model of the file: {', '.join(sorted(names - {one.name})) or 'there is none'}"
            )
