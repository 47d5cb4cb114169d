"""Runs the whole stack on this machine: each service is its own supervised process.

A service that dies by itself is started again. Instances may be added and removed at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from pathlib import Path

import httpx

from millrace.concurrency import all_or_first_error, cancel
from millrace.core.backoff import Backoff
from millrace.core.config import TlsConfig
from millrace.core.config.models import ModelConfig, models_file
from millrace.core.errors import ConfigError, MillraceError
from millrace.home import temporary_folder
from millrace.local.authority import as_settings, issue_certificates
from millrace.local.options import StackOptions, as_arguments
from millrace.local.private_redis import PrivateRedis
from millrace.local.processes.service import Service, StartupError
from millrace.state.store import StoreError

log = logging.getLogger(__name__)

#: The services, in the order in which they stop.
_WAVES = (("proxy",), ("prefill", "decode", "colocated"), ("kvp",), ("scheduler",))

#: How long a started stack may take to know its instances.
READY_S = 30.0
READY_LOOK_S = 0.02
RESTART = Backoff(0.5, 10.0)


class UncleanStopError(MillraceError):
    """A stopped service did not end well: it leaked, crashed or had to be killed."""


class Stack:
    """All processes of one `millrace up`.

    async with Stack(options) as stack:
        ... stack.url ...
    """

    def __init__(
        self, options: StackOptions, progress: Callable[[str], None] = lambda _: None
    ) -> None:
        self.options = options
        self._devices = options.device_pool()
        self.directory = Path(tempfile.mkdtemp(prefix="millrace-", dir=temporary_folder()))
        self._logs = options.logs or self.directory
        self.services: dict[str, Service] = {}
        self._progress = progress
        self._redis: PrivateRedis | None = None
        self._redis_keeper: asyncio.Task[None] | None = None
        self._workers: list[list[str]] = [[]]  # arguments of every instance, by model
        self._made = Counter[str]()  # instances by role, ever: a name is never used twice
        #: Where services serve their metrics; none without `metrics_port`.
        self.metrics_ports: dict[str, int] = {}
        self._next_metrics_port = options.metrics_port
        self._removals: set[asyncio.Task[None]] = set()
        self._unclean: list[str] = []
        self._stopping = False
        self._group = uuid.uuid4().hex[:8]
        #: The certificates between the services, if the stack has made some.
        self.tls = TlsConfig()

    @property
    def url(self) -> str:
        """The gateway's base URL."""
        return f"http://{self.options.host}:{self.services['proxy'].port}"

    @property
    def models_file(self) -> Path:
        """The file of the proxy's models, if there are several."""
        return self.directory / "models.toml"

    @property
    def redis_pid(self) -> int | None:
        """Returns the process id of the private Redis; None while there is none."""
        return None if self._redis is None else self._redis.pid

    @property
    def redis_data(self) -> Path | None:
        """Returns the folder with the private Redis's data; None while there is none."""
        return None if self._redis is None else self._redis.data

    @property
    def scheduler_address(self) -> str:
        """The first model's schedulers, host:port, separated by commas."""
        return self._addresses(0)

    @property
    def scheduler_addresses(self) -> list[str]:
        """Every model's schedulers, host:port, separated by commas."""
        return [self._addresses(number) for number in range(len(self.options.models()))]

    def _addresses(self, model: int) -> str:
        names = self._scheduler_names(model)
        return ",".join(f"127.0.0.1:{self.services[name].port}" for name in names)

    def _scheduler_names(self, model: int) -> list[str]:
        """The names of a model's schedulers; the first model's first one is "scheduler"."""
        first = f"scheduler-{model}" if model else "scheduler"
        others = range(1, self.options.schedulers)
        return [first, *(f"scheduler-{model}-standby-{number}" for number in others)]

    async def __aenter__(self) -> Stack:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _start(self) -> None:
        o = self.options
        self._logs.mkdir(parents=True, exist_ok=True)
        redis_url, files = o.redis, []
        if not redis_url:
            self._progress("starting a private Redis")
            self._redis = PrivateRedis()
            redis_url = await self._redis.start(self.directory)
            if not o.files:  # their records end with this Redis
                files = [f"files.url={self.directory / 'files'}"]
        if o.tls:
            self.tls = issue_certificates(self.directory / "tls")
        own = [f"store.url={redis_url}", *files, *(as_settings(self.tls) if o.tls else ())]
        common = as_arguments(*own) + o.common_arguments
        self._progress("starting the scheduler")
        served = []
        for number, (model, name) in enumerate(o.models()):
            address = await self._start_scheduler(number, common)
            served.append(ModelConfig(name=name, model=model, scheduler=address))
        self._workers = [[*common, *_served_by(one)] for one in served]
        workers = [
            self._instance(role, number)
            for number in range(len(served))
            for role, count in o.fleet.items()
            for _ in range(count)
        ]
        for worker in workers:
            self._give_devices(worker)
        peers = self._workers[0]
        if len(served) > 1:
            self.models_file.write_text(models_file(served), encoding="utf-8")
            peers = [*common, *as_arguments(f"proxy.models_file={self.models_file}")]
        proxy = self.service("proxy", ["proxy", *peers, "--host", o.host, "--port", str(o.port)])
        fleet = ", ".join(f"{count} {role}" for role, count in o.fleet.items())
        self._progress(f"loading {', '.join(one.model for one in served)}: {fleet}")
        await all_or_first_error(w.start(o.start_timeout_s) for w in [*workers, proxy])
        proxy.arguments[proxy.arguments.index("--port") + 1] = str(proxy.port)
        await self.wait_until_ready()
        self.keep()

    async def wait_until_ready(self) -> None:
        """Waits until the gateway would serve a request: it has heard of the fleet. Raises
        StartupError when the gateway has ended.
        """
        proxy = self.services["proxy"]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_S), httpx.AsyncClient(base_url=self.url) as client:
                while True:
                    with contextlib.suppress(httpx.TransportError):
                        if (await client.get("/ready")).status_code == HTTPStatus.OK:
                            return
                    if proxy.serving_pid is None:
                        raise StartupError(f"proxy: {proxy.ending()}")
                    await asyncio.sleep(READY_LOOK_S)
        log.warning("the gateway takes no requests yet: its fleet is not complete")

    async def _start_scheduler(self, number: int, common: Sequence[str]) -> str:
        """Starts the schedulers of model `number`; returns their addresses, which they keep.

        The first model's first scheduler records the run, if it is to be recorded.
        """
        group = as_arguments(f"scheduler.group={self.group_of(number)}")
        for name in self._scheduler_names(number):
            record = self.options.record if name == "scheduler" else None
            recorded = [] if record is None else ["--record", str(record.absolute())]
            arguments = ["scheduler", *common, *group, *recorded, "--port", "0"]
            scheduler = self.service(name, arguments)
            await scheduler.start(self.options.start_timeout_s)
            scheduler.arguments[scheduler.arguments.index("--port") + 1] = str(scheduler.port)
        return self._addresses(number)

    def group_of(self, model: int) -> str:
        """Returns the group of a model's schedulers: other stacks may use the same Redis."""
        return f"{self._group}-{model}"

    def supervise(self, service: Service) -> Service:
        """Takes a service into the stack: `stop` ends it."""
        self.services[service.name] = service
        return service

    def keep(self) -> None:
        """Restarts services that die, from now on."""
        for service in self.services.values():
            service.keeper = asyncio.create_task(self._keep(service))
        if self._redis is not None:
            self._redis_keeper = asyncio.create_task(self._keep_redis(self._redis))

    def instances(self, role: str) -> list[str]:
        """Returns the instances' names of a role, oldest first, starting instances included."""
        return [name for name in self.services if name.rpartition("-")[0] == role]

    def add(self, role: str) -> str:
        """Starts one more instance and returns its name at once.

        Its service is `serving` later, or is removed from the services if it could not start.
        """
        service = self._instance(role)
        service.keeper = asyncio.create_task(self._bring_up(service))
        return service.name

    def remove(self, name: str) -> None:
        """Ends an instance for good, in the background: SIGTERM makes it drain."""
        removal = asyncio.create_task(self._remove(self.services.pop(name)))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def _bring_up(self, service: Service) -> None:
        try:
            await self._wait_for_devices(service)
            await service.start(self.options.start_timeout_s)
        except (StartupError, ConfigError, OSError) as error:
            log.warning("%s could not be started: %s", service.name, error)
            self.services.pop(service.name, None)
            self._devices.give_back(service.name)
            return
        await self._keep(service)

    async def _remove(self, service: Service) -> None:
        await _end([service])
        died = service.process is not None and service.process.returncode is not None
        await service.stop()
        self._devices.give_back(service.name)
        # Its death may be the reason for its removal, also if that is not known before `stop`.
        if not (died or service.was_struck):
            self._unclean += _complaints([service])

    def _instance(self, role: str, model: int = 0) -> Service:
        name = f"{role}-{self._made[role]}"
        self._made[role] += 1
        arguments = [role, *self._workers[model], "--id", name, *self.options.engine_settings(role)]
        if role == "colocated":
            arguments += ["--role", self.options.colocation]
        return self.service(name, arguments)

    def service(self, name: str, arguments: list[str]) -> Service:
        """Makes a service of the stack that runs `millrace` with these arguments."""
        if self._next_metrics_port and name != "proxy":  # it has its metrics on its own port
            port = self.metrics_ports[name] = self._next_metrics_port
            self._next_metrics_port += 2 if arguments[0] == "colocated" else 1
            arguments = [*arguments, *as_arguments(f"telemetry.metrics_port={port}")]
        return self.supervise(Service(name, arguments, self._logs / f"{name}.log"))

    def _give_devices(self, service: Service) -> None:
        """Lends devices to a service. Raises ConfigError when none are free."""
        if names := self._devices.take(service.name):
            service.environment = {"CUDA_VISIBLE_DEVICES": ",".join(names)}

    async def _wait_for_devices(self, service: Service) -> None:
        """Lends devices to a service, after leaving instances have given theirs back."""
        while True:
            try:
                return self._give_devices(service)
            except ConfigError:
                if not self._removals:
                    raise
            await asyncio.wait(self._removals, return_when=asyncio.FIRST_COMPLETED)

    async def _keep(self, service: Service) -> None:
        """Restarts a service when it dies by itself, after a pause that grows."""
        failures = 0  # in a row
        while True:
            if service.process is not None:
                await service.process.wait()
            log.warning("%s died (%s); starting it again", service.name, service.ending())
            await asyncio.sleep(RESTART.pause_s(failures))
            service.restarts += 1
            try:
                await service.start(self.options.start_timeout_s)
                failures = 0
            except (StartupError, OSError) as error:
                failures += 1
                log.warning("%s could not be started: %s", service.name, error)

    async def _keep_redis(self, redis: PrivateRedis) -> None:
        """Restarts the private Redis when it dies, with the data that it had."""
        failures = 0  # in a row
        while True:
            await redis.ended()
            log.warning("the private Redis died; starting it again")
            await asyncio.sleep(RESTART.pause_s(failures))
            try:
                await redis.start(self.directory)
                failures = 0
            except StoreError as error:
                failures += 1
                log.warning("the private Redis could not be started: %s", error)

    async def stop(self) -> None:
        """Stops the proxy first, so that running answers finish; then the workers, KVP workers
        last; then scheduler and Redis.

        Raises UncleanStopError when a service ended with an error, unless another exception is
        raised.
        """
        if self._stopping:
            return
        self._stopping = True
        await asyncio.gather(*self._removals)
        await _end(self.services.values())  # first, so that no service is started during the stop
        for wave in _WAVES:
            await asyncio.gather(
                *(s.stop() for n, s in self.services.items() if n.split("-")[0] in wave)
            )
        if self._redis_keeper is not None:
            await cancel(self._redis_keeper)
        if self._redis is not None:
            await self._redis.stop()
        unclean = self._unclean + _complaints(self.services.values())
        shutil.rmtree(self.directory, ignore_errors=True)
        if unclean and sys.exception() is None:
            raise UncleanStopError("; ".join(unclean))


async def _end(services: Iterable[Service]) -> None:
    """Cancels the tasks that would restart the services."""
    keepers = [service.keeper for service in services if service.keeper is not None]
    for keeper in keepers:
        keeper.cancel()
    for ended in await asyncio.gather(*keepers, return_exceptions=True):
        if isinstance(ended, Exception):
            log.error("a service was no longer watched over", exc_info=ended)


def _complaints(services: Iterable[Service]) -> list[str]:
    """Returns an error line for each service that did not end well."""
    return [
        f"{s.name} ended with status {s.process.returncode}: {s.last_output()}"
        for s in services
        if s.process is not None and not s.ended_well
    ]


def _served_by(model: ModelConfig) -> list[str]:
    named = ["--model-name", model.name] if model.name else []
    return ["--model", model.model, *named, "--scheduler", model.scheduler]
