"""The models of a gateway: its ModelService's own, and those of the ModelServices that it lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from millrace.core.config import Config
from millrace.core.config.models import (
    OWN_SETTINGS,
    Canary,
    ModelConfig,
    models_file,
    read_models_file,
)
from millrace.core.errors import ConfigError
from millrace_operator.manifests import config_file, naming
from millrace_operator.observed import Service
from millrace_operator.schema.gateway import GatewayModel
from millrace_operator.spec import SpecError

#: The mount of a model's weights in its own pods, and in the pods of other gateways.
MODELS, OTHERS = "/models", "/others"
MODELS_FOLDER, MODELS_FILE = "/etc/millrace-models", "models.toml"


def lists_models(service: Service) -> bool:
    """Whether the gateway reads a file of models, in place of its one model's arguments."""
    gateway = service.spec.gateway
    return bool(gateway.models or gateway.aliases)


def others_folder(service: str) -> str:
    """Returns the mount of another ModelService's weights in a gateway's pods."""
    return f"{OTHERS}/{service}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayModels:
    """The services behind a gateway, its own first.

    `problems` say why listed services are left out, a sentence each.
    """

    services: Mapping[str, Service]
    problems: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, own: Service, found: Mapping[str, Service], redis_of_operator: str
    ) -> GatewayModels:
        """`found`: the listed ModelServices that exist and are right."""
        services, problems = {own.name: own}, []
        for index, listed in enumerate(own.spec.gateway.models or ()):
            path, other = f"spec.gateway.models[{index}].service", found.get(listed.service)
            if listed.service == own.name:
                problems.append(f"{path} is {listed.service!r}, the ModelService itself")
            elif other is None:
                problems.append(f"{path} is {listed.service!r}; there is no such ModelService")
            elif (wrong := _wrong(other)) is not None:
                problems.append(f"{path} is {listed.service!r}, whose spec is wrong: {wrong}")
            elif _redis(other, redis_of_operator) != _redis(own, redis_of_operator):
                problems.append(f"{path} is {listed.service!r}, whose spec.redis differs")
            else:
                services[listed.service] = other
        return cls(services=services, problems=tuple(problems))

    @property
    def others(self) -> Iterator[Service]:
        """The services of the list, without the gateway's own."""
        _, *others = self.services.values()
        return iter(others)

    def text(self, own: Service, config: Config) -> str:
        """Returns the file of models. Raises SpecError."""
        listed = {one.service: one for one in own.spec.gateway.models or ()}
        gateway = own.spec.gateway
        first = GatewayModel(service=own.name, aliases=gateway.aliases, canary=gateway.canary)
        models = [self._model(own, first, None)]
        models += [self._model(one, listed[one.name], _settings(one)) for one in self.others]
        names = [model.name for model in models]
        if twice := [name for name in names if names.count(name) > 1]:
            raise SpecError(f"spec.gateway.models has two services of the model {twice[0]!r}")
        text = models_file(models)
        try:
            read_models_file(text, config)
        except ConfigError as error:
            raise SpecError(f"spec.gateway.models: {error}") from error
        return text

    def _model(
        self, service: Service, entry: GatewayModel, settings: Mapping[str, str] | None
    ) -> ModelConfig:
        """`settings` is None for the gateway's own model, whose settings are the gateway's."""
        spec, uri = service.spec, service.spec.model.uri
        if settings is not None and uri.startswith(f"{MODELS}/"):
            uri = others_folder(service.name) + uri.removeprefix(MODELS)
        canary, share = None, entry.canary
        if share is not None and (other := self.services.get(share.service)) is not None:
            canary = Canary(model=other.spec.model.name, percent=float(share.percent))
        return ModelConfig(
            name=spec.model.name,
            model=uri,
            scheduler=f"{naming.part_name(service.name, 'scheduler')}:{naming.SCHEDULER_PORT}",
            aliases=entry.aliases or (),
            canary=canary,
            settings=settings or None,
        )


def _settings(service: Service) -> dict[str, str]:
    """Returns the settings of another service by which its model is served."""
    tables = config_file.tables(service.spec)
    flat = {f"{s}.{n}": value for s, table in tables.items() for n, value in table.items()}
    return {name: str(flat[name]) for name in OWN_SETTINGS if name in flat}


def _wrong(service: Service) -> str | None:
    """Returns why the settings of a service can't be read."""
    try:
        config_file.tables(service.spec)
    except SpecError as error:
        return str(error)
    return None


def _redis(service: Service, of_operator: str) -> tuple[str, str]:
    given = service.spec.redis
    return (of_operator, "url") if given is None else (given.secret_ref.name, given.secret_ref.key)
