"""Runs the operator: elects the leader, starts its work and ends it. Reads the environment."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from kubernetes.aio import client

from millrace.concurrency import stop_event, until_one_ends
from millrace.core.config import load_config
from millrace.core.errors import MillraceError
from millrace.telemetry.log import setup_logging
from millrace.telemetry.metrics import Registry
from millrace.telemetry.metrics_server import serve_metrics
from millrace.wire.tls import use_tls
from millrace_operator.metrics import OperatorMetrics
from millrace_operator.run.cluster import Cluster, Parts, scheduler_address
from millrace_operator.run.crds import apply_crds, read_crds, wait_until_served
from millrace_operator.run.election import Election, Terms
from millrace_operator.run.handlers import Touches, watch
from millrace_operator.run.kube import Kube, load_configuration
from millrace_operator.run.load import Schedulers
from millrace_operator.run.queue import Key, Pace, WorkQueue
from millrace_operator.run.runner import Runner
from millrace_operator.run.scaler import Scaler
from millrace_operator.schema.pools import KINDS
from millrace_operator.spec import Defaults

log = logging.getLogger(__name__)

TLS = "MILLRACE_TLS__"
ROLES = ("proxy", "scheduler", *(kind.role for kind in KINDS.values()))

#: Timeout in seconds of one renewal, which is then tried again: the lease must outlive several
#: renewals.
LEASE_CALL_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The operator's options."""

    #: Called at the start, and by kopf again whenever the API server asks for a login.
    configuration: Callable[[], Awaitable[client.Configuration]]
    defaults: Defaults
    namespaces: tuple[str, ...] = ()  # empty: all namespaces
    lease_namespace: str = "default"
    lease_name: str = "millrace-operator"
    identity: str
    host: str = "0.0.0.0"
    metrics_port: int = 9090
    crds: tuple[Mapping[str, Any], ...] = ()  # applied at the start
    terms: Terms = field(default_factory=Terms)
    pace: Pace = field(default_factory=Pace)
    address: Callable[[str, str], str] = scheduler_address


class Operator:
    """One operator process. `run` ends when it is cancelled, or raises an error that it can't
    handle.
    """

    def __init__(self, options: Options, configuration: client.Configuration) -> None:
        self._options = options
        self.registry = Registry()
        self._metrics = OperatorMetrics(self.registry)
        self._watching = False
        on_call = self._metrics.count_call
        self._kube = Kube(configuration, on_call=on_call)
        self._lease_kube = Kube(configuration, timeout_s=LEASE_CALL_S, on_call=on_call)
        self.election = Election(
            self._lease_kube,
            namespace=options.lease_namespace,
            name=options.lease_name,
            identity=options.identity,
            terms=options.terms,
        )
        schedulers = Schedulers(on_error=self._metrics.load_errors.inc)
        self._cluster = Cluster(
            Parts(
                kube=self._kube,
                schedulers=schedulers,
                scaler=Scaler(schedulers),
                metrics=self._metrics,
                leads=self.election.may_act,
                identity=options.identity,
                address=options.address,
            )
        )
        runner = Runner(self._cluster, options.defaults, self._metrics)
        self._queue = WorkQueue(runner.reconcile, pace=options.pace)
        self._metrics.watch_queue(self._queue.waiting)

    async def run(self) -> None:
        """Waits for the lease, leads, and releases the lease when it is cancelled.

        Raises LeaseLost, KubeRefused for missing rights, and any error that ends kopf.
        """
        options = self._options
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._lease_kube.close)
            server = await serve_metrics(
                options.metrics_port, self.ready, registry=self.registry, host=options.host
            )
            stack.push_async_callback(server.close)
            stack.push_async_callback(self.election.release)
            # Started writes end before another operator leads.
            stack.push_async_callback(self._kube.close)
            await self.election.acquire()
            self._metrics.leading.set(1.0)
            await until_one_ends(self.election.hold(), self._work())

    def ready(self) -> bool:
        """Returns the answer to /ready: the operator leads and watches, or waits without an
        error.
        """
        return self._watching if self.election.leading else self.election.in_order()

    async def _work(self) -> None:
        await apply_crds(self._kube, self._options.crds)
        await wait_until_served(self._kube)
        await until_one_ends(self._queue.run(), self._watch())

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        touches = Touches(lambda key: loop.call_soon_threadsafe(self._touch, key))
        self._watching = True
        try:
            await watch(touches, self._options.configuration, namespaces=self._options.namespaces)
        finally:
            self._watching = False

    def _touch(self, key: Key) -> None:
        self._cluster.changed(key)
        self._queue.touch(key)


async def serve(options: Options) -> None:
    """Runs an operator until SIGTERM or SIGINT. Raises MillraceError."""
    stop = stop_event()
    operator = Operator(options, await options.configuration())
    await until_one_ends(operator.run(), stop.wait())


def defaults_from(environment: Mapping[str, str]) -> Defaults:
    """Reads the images and secrets for specs that name none. Raises MillraceError for a missing
    image.
    """
    images = {role: environment.get(f"MILLRACE_IMAGE_{role.upper()}", "") for role in ROLES}
    missing = [f"MILLRACE_IMAGE_{role.upper()}" for role, image in images.items() if not image]
    if missing:
        raise MillraceError(f"the environment lacks {', '.join(missing)}")
    return Defaults(
        images=images,
        pull_policy=environment.get("MILLRACE_IMAGE_PULL_POLICY", "IfNotPresent"),
        redis_secret=environment.get("MILLRACE_REDIS_SECRET", ""),
    )


def use_settings_of(environment: Mapping[str, str], *, log_format: str, log_level: str) -> None:
    """Sets TLS to schedulers from MILLRACE_TLS__*, and logging. Raises ConfigError."""
    given = {
        f"tls.{name.removeprefix(TLS).lower()}": value
        for name, value in environment.items()
        if name.startswith(TLS)
    }
    given |= {"telemetry.log_format": log_format, "telemetry.log_level": log_level}
    config = load_config(overrides=[f"{name}={value}" for name, value in given.items()])
    setup_logging(config.telemetry, "operator")
    logging.getLogger("kopf").setLevel(logging.WARNING)
    use_tls(config.tls)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(  # noqa: PLR0913 - a command's options are its arguments
    namespace: Annotated[
        list[str],
        typer.Option(metavar="NAME", help="Look after this namespace only; repeat for several."),
    ] = [],  # noqa: B006 - typer wants a literal default
    lease_namespace: Annotated[
        str, typer.Option(metavar="NAME", help="Of the Lease; default: $POD_NAMESPACE.")
    ] = "",
    lease_name: Annotated[
        str, typer.Option(metavar="NAME", help="Operators of one name take turns.")
    ] = "millrace-operator",
    scheduler_address: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Of schedulers, with {service} and {namespace}; for an operator that runs where "
            "the cluster's names are unknown.",
        ),
    ] = scheduler_address("{namespace}", "{service}"),
    metrics_port: Annotated[
        int, typer.Option(metavar="PORT", help="Of /metrics, /health and /ready; 0: a free one.")
    ] = 9090,
    log_format: Annotated[str, typer.Option(metavar="text|json")] = "json",
    log_level: Annotated[str, typer.Option(metavar="debug|info|warning|error")] = "info",
    kubeconfig: Annotated[
        str, typer.Option(metavar="FILE", help="Default: the pod's service account.")
    ] = "",
    context: Annotated[str, typer.Option(metavar="NAME", help="Of the kubeconfig.")] = "",
) -> None:
    """The operator: builds, scales and drains what ModelServices and their pools ask for."""
    environment = os.environ
    try:
        use_settings_of(environment, log_format=log_format, log_level=log_level)
        crds = environment.get("MILLRACE_CRDS", "")
        pod = environment.get("POD_NAME") or socket.gethostname()
        options = Options(
            configuration=partial(load_configuration, kubeconfig, context),
            defaults=defaults_from(environment),
            namespaces=tuple(namespace),
            lease_namespace=lease_namespace or environment.get("POD_NAMESPACE", "default"),
            lease_name=lease_name,
            identity=f"{pod}_{uuid.uuid4()}",  # a restarted container has another name
            metrics_port=metrics_port,
            crds=tuple(read_crds(Path(crds))) if crds else (),
            address=lambda namespace, service: scheduler_address.format(
                namespace=namespace, service=service
            ),
        )
        asyncio.run(serve(options))
    except MillraceError as error:
        log.error("%s", error)
        raise typer.Exit(1) from None


def main() -> None:
    app()
