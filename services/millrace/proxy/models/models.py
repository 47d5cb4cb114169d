"""The models of one proxy: found by name, shared with canaries, exchanged while requests run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from hashlib import sha256

from millrace.concurrency import cancel
from millrace.core.config import Config
from millrace.core.config.models import Canary, ModelConfig, read_models_file
from millrace.core.errors import MillraceError
from millrace.proxy.errors import ApiError, shown
from millrace.proxy.fleet.gateway import Gateway
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.metrics import INFLIGHT, PARKED, STREAMING, WAITING
from millrace.proxy.models.served_model import MakeGateway, ServedModel, read_model
from millrace.proxy.tenancy.caller import Caller
from millrace.proxy.watched_file import LOOK_S, WatchedFile
from millrace.wire.fleet_messages import Progress

log = logging.getLogger(__name__)

#: A model that could not be read is tried again after this time.
RETRY_S = 10.0
#: A model that left the list ends when it has had no request for this long.
IDLE_S = 1.0

_Served = dict[str, tuple[ModelConfig, ServedModel]]


class Models:
    """All models, in the order of the list. Used from the event loop only.

    A model that leaves the list gets no new request; those that run are finished. A change of the
    names or of the canary alone leaves the model's parts in place.
    """

    def __init__(
        self, config: Config, model: ModelConfig | None, make_gateway: MakeGateway
    ) -> None:
        """Reads `model`, or else the models of `proxy.models_file`.

        Raises ConfigError for a wrong list, ModelError if none of its models can be read.
        """
        self._config = config
        self._make_gateway = make_gateway
        self._wanted: list[ModelConfig] = [] if model is None else [model]
        self._file: WatchedFile | None = None
        if model is None:
            self._file = WatchedFile("proxy.models_file", config.proxy.models_file, self._take)
            self._file.read()
        self._served: _Served = {}
        self._failed_at: dict[str, float] = {}
        self._leaving: dict[ServedModel, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None
        #: Set when the process shuts down.
        self.draining = False
        self._names: dict[str, ServedModel] = {}
        self._canaries: Mapping[str, tuple[Canary, ServedModel]] = {}
        #: Grows with every change of the list.
        self.version = 0
        self._read_first()

    def _read_first(self) -> None:
        errors = []
        for one in self._wanted:
            try:
                made = read_model(one, self._config, self._make_gateway)
                self._served[made.name] = one, made
            except MillraceError as error:
                self._fail(one, error)
                errors.append(error)
        if not self._served:
            raise errors[0]
        self._publish()

    # -- start and end

    def start(self) -> None:
        """Connects the models to their fleets, and follows the file from now on."""
        for one in self.listed:
            one.gateway.start()
        if self._file is not None:
            self._watching = asyncio.create_task(self._watch())

    def drain(self) -> None:
        """Takes no new request, and no new model."""
        self.draining = True
        if self._watching is not None:
            self._watching.cancel()
        for one in self.all:
            one.gateway.drain()

    async def close(self) -> None:
        """Cancels all requests and frees all models."""
        tasks = [*self._leaving.values(), *([self._watching] if self._watching else [])]
        models = self.all
        await cancel(*tasks)
        await asyncio.gather(*(one.close() for one in models))

    # -- the models

    @property
    def listed(self) -> list[ServedModel]:
        """The models of the list that could be read; the first is the default."""
        return [one for _, one in self._served.values()]

    @property
    def first(self) -> ServedModel:
        """The model of a request that may leave its model out."""
        return self.listed[0]

    @property
    def all(self) -> list[ServedModel]:
        """The listed models, and those that finish their last requests."""
        return [*self.listed, *self._leaving]

    @property
    def ready(self) -> bool:
        """Whether a request to one of the models would be taken."""
        return any(one.gateway.ready for one in self.listed)

    def scheduler_of(self, name: str | None) -> str:
        """Returns the address of a model's scheduler, as `named`."""
        return self.named(name).scheduler

    def schedulers(self) -> list[str]:
        """Returns the addresses of all schedulers."""
        return list(dict.fromkeys(one.scheduler for one in self.listed))

    @property
    def inflight(self) -> int:
        """The open requests of all models."""
        return sum(one.gateway.inflight for one in self.all)

    def measured(self) -> dict[str, dict[str, float]]:
        """Returns the numbers of open requests by model and metric."""
        found: dict[str, dict[str, float]] = {}
        for one in self.all:
            counts = found.setdefault(
                one.name, dict.fromkeys((INFLIGHT, PARKED, STREAMING, WAITING), 0)
            )
            counts[INFLIGHT] += one.gateway.inflight
            counts[PARKED] += one.gateway.parked
            counts[STREAMING] += (streaming := one.gateway.streaming)
            counts[WAITING] += one.gateway.inflight - streaming
        return found

    @property
    def names(self) -> list[str]:
        """All names that requests may give."""
        return list(self._names)

    def names_for(self, caller: Caller) -> list[tuple[str, ServedModel]]:
        """Returns every name that the caller may use, with its model."""
        return [(name, one) for name, one in self._names.items() if _may_use(caller, name, one)]

    def find(self, name: str, caller: Caller) -> ServedModel:
        """Returns the model with this name. Raises ApiError: 404, or 403 if it is not allowed."""
        found = self._names.get(name)
        if found is None:
            raise self._unknown(name, (known for known, _ in self.names_for(caller)))
        if not _may_use(caller, name, found):
            caller.check_model(name)
        return found

    def named(self, name: str | None) -> ServedModel:
        """Returns the model with this name; None: the first. Raises ApiError (404)."""
        if name is None:
            return self.first
        if (found := self._names.get(name)) is None:
            raise self._unknown(name, self._names)
        return found

    def is_ready(self, name: str) -> bool:
        """Whether a request that names this model would be taken."""
        found = self._names.get(name)
        return found is None or found.gateway.ready

    def choose(self, name: str | None, caller: Caller, digits: str) -> ServedModel:
        """Returns the model that answers a request, maybe a canary. Raises ApiError as `find`.

        `name` None: the first model. Requests with the same `digits` of their ids have the same
        model, as long as the percentage stays. A canary that is not ready gets no request.
        """
        found = self.find(self.first.name if name is None else name, caller)
        if (shared := self._canaries.get(found.name)) is None:
            return found
        canary, other = shared
        return other if is_canary(digits, canary.percent) and other.gateway.ready else found

    def of_stream(self, name: str) -> ServedModel:
        """Returns the model that wrote a stream. Raises ApiError (404) if it is gone."""
        for one in self.all:
            if one.name == name:
                return one
        raise self._unknown(name, self._names)

    def gateway_of(self, response_id: str) -> Gateway | None:
        """Returns the gateway that has open requests of a response."""
        return next((m.gateway for m in self.all if m.gateway.of_response(response_id)), None)

    def open_requests(self, response_id: str) -> list[ProxyRequest]:
        """Returns the open requests of a response, at any model."""
        gateway = self.gateway_of(response_id)
        return [] if gateway is None else gateway.of_response(response_id)

    async def ask_progress(self, request_id: str) -> Progress | None:
        """Returns what a scheduler says of a request of any replica; None if none knows it."""
        asked = [asyncio.create_task(m.gateway.prompts.ask([request_id])) for m in self.all]
        try:
            for answer in asyncio.as_completed(asked):
                if (found := (await answer).get(request_id)) is not None:
                    return found
        finally:
            for one in asked:
                one.cancel()
        return None

    def _unknown(self, name: str, known: Iterable[str]) -> ApiError:
        has = ", ".join(map(repr, known)) or "no model for this key"
        return ApiError(
            404,
            f"The model {shown(name)} does not exist; this server has {has}.",
            param="model",
            code="model_not_found",
        )

    # -- changes of the list

    def _take(self, text: str) -> None:
        self._wanted = read_models_file(text, self._config)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception:
                log.exception("the list of models could not be followed")

    async def look(self) -> None:
        """Reads the file again if it has changed, and makes its models the models of the proxy."""
        assert self._file is not None, "there is a file to look at"
        before = self._wanted
        self._file.look()
        if self._wanted is not before:
            self._failed_at.clear()
        elif not self._failed_at:
            return
        served: _Served = {}
        for wanted in self._wanted:
            if (found := await self._found(wanted)) is not None:
                served[wanted.name] = found
        if not served:
            log.error("none of the listed models can be served: the models before stay")
            return
        kept = {model for _, model in served.values()}
        leaving = [model for _, model in self._served.values() if model not in kept]
        self._served = served
        self._publish()
        for model in leaving:
            self._retire(model)

    async def _found(self, wanted: ModelConfig) -> tuple[ModelConfig, ServedModel] | None:
        """Returns the parts that serve a model: the present, or new ones if they must differ.

        If new parts can't be made, the present ones stay; None: there are none.
        """
        known = self._served.get(wanted.name)
        if known is not None and known[0].same_parts(wanted):
            return wanted, known[1]
        failed_at = self._failed_at.get(wanted.name)
        if failed_at is not None and time.monotonic() - failed_at < RETRY_S:
            return known
        try:
            made = await asyncio.to_thread(read_model, wanted, self._config, self._make_gateway)
        except MillraceError as error:
            self._fail(wanted, error)
            return known
        self._failed_at.pop(wanted.name, None)
        made.gateway.start()
        log.info("model %s is served by %s", made.name, made.scheduler)
        return wanted, made

    def _fail(self, wanted: ModelConfig, error: MillraceError) -> None:
        self._failed_at[wanted.name] = time.monotonic()
        log.error("model %s can't be served: %s", wanted.name or wanted.model, error)

    def _publish(self) -> None:
        names: dict[str, ServedModel] = {}
        canaries: dict[str, tuple[Canary, ServedModel]] = {}
        for wanted, model in self._served.values():
            names |= dict.fromkeys((model.name, *wanted.aliases), model)
            other = self._served.get(wanted.canary.model) if wanted.canary else None
            if wanted.canary and other is not None:
                canaries[model.name] = (wanted.canary, other[1])
        self.version += list(names.items()) != list(self._names.items())
        self._names, self._canaries = names, canaries

    def _retire(self, model: ServedModel) -> None:
        log.info("model %s of %s leaves when its requests have ended", model.name, model.scheduler)
        self._leaving[model] = asyncio.create_task(self._finish(model))

    async def _finish(self, model: ServedModel) -> None:
        idle_since = time.monotonic()
        while time.monotonic() - idle_since < IDLE_S:
            await asyncio.sleep(IDLE_S / 4)
            if model.gateway.inflight:
                idle_since = time.monotonic()
        await model.close()
        del self._leaving[model]


def is_canary(digits: str, percent: float) -> bool:
    """Whether a request whose id has these digits is one of `percent` in 100."""
    share = int.from_bytes(sha256(digits.encode()).digest()[:8], "big") / 2**64
    return share < percent / 100


def _may_use(caller: Caller, name: str, model: ServedModel) -> bool:
    """Whether the caller may use the name, or the model whatever its name."""
    return caller.may_use(name) or caller.may_use(model.name)
