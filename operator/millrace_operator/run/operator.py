"""One operator process: it elects the leader, works while it leads, and ends in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kubernetes.aio import client

from millrace.concurrency import stop_event, until_one_ends
from millrace.listening import EVERYWHERE
from millrace.telemetry.metrics import Registry
from millrace.telemetry.metrics_server import serve_metrics
from millrace_operator.metrics import OperatorMetrics
from millrace_operator.run.cluster import Cluster, Parts, scheduler_address
from millrace_operator.run.crds import apply_crds, is_served, wait_until_served
from millrace_operator.run.election import Election, Terms
from millrace_operator.run.handlers import Touches, watch
from millrace_operator.run.kube import Kube
from millrace_operator.run.load import Schedulers
from millrace_operator.run.queue import Key, Pace, WorkQueue
from millrace_operator.run.runner import Runner
from millrace_operator.run.scaler import Scaler
from millrace_operator.spec import Defaults

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
    host: str = EVERYWHERE
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
        self._cluster.has_leader_worker_sets = await is_served(self._kube, "LeaderWorkerSet")
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
    """Runs an operator until SIGTERM, SIGINT or SIGHUP. Raises MillraceError."""
    stop = stop_event()
    operator = Operator(options, await options.configuration())
    await until_one_ends(operator.run(), stop.wait())
