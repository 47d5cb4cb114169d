"""Elects the operator that acts: the holder of a Lease (coordination.k8s.io/v1).

The rules come from client-go's leaderelection package (its package documentation and
`tryAcquireOrRenew`): a lease is free when it has no holder, or when its record has not changed for
its duration by the observer's clock; clocks of two processes are never compared. The holder renews
it and gives up `renew_s` after the last success, before another candidate may take it. Deviations:
times come from a monotonic clock, and an operator that loses the lease ends (LeaseLost) and never
waits to lead again, so that nothing of the old term can act in a new term.

`kubernetes.aio.leaderelection` is not used: it reads the wall clock, keeps the lease when the
process ends, and cancels the leader's work without waiting for its end.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from millrace.core.errors import MillraceError
from millrace_operator.run.kube import RESOURCES, Kube, KubeError, micro_time

log = logging.getLogger(__name__)

#: The most attempts to release the lease; after them it expires.
RELEASE_TRIES = 3


class LeaseLost(MillraceError):
    """Another operator may lead now: stop at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Times in seconds; the defaults are those of Kubernetes' own components."""

    lease_s: float = 15.0  # other candidates wait this long for a silent leader
    renew_s: float = 10.0  # the leader gives up this long after its last success
    retry_s: float = 2.0  # between two attempts of a candidate

    def __post_init__(self) -> None:
        if not 0.0 < self.retry_s < self.renew_s < self.lease_s:
            raise MillraceError("a lease needs retry_s < renew_s < lease_s")


class Election:
    """One candidate. It calls through a client of its own, so that no other call delays a
    renewal.
    """

    def __init__(
        self,
        kube: Kube,
        *,
        namespace: str,
        name: str,
        identity: str,
        terms: Terms | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._namespace, self._name = namespace, name
        self._identity = identity
        self._terms = terms or Terms()
        self._clock = clock
        self._lease: dict[str, Any] | None = None  # as last seen
        self._changed_s = -math.inf  # when this process first saw this record
        self._heard_s = -math.inf  # when the API server last answered
        self._renewed_s = -math.inf  # when this candidate last held it
        self.leading = False

    async def acquire(self) -> None:
        """Returns once this candidate leads."""
        while True:
            if await self._try():
                self.leading = True
                log.info("%s leads", self._identity)
                return
            await asyncio.sleep(self._terms.retry_s)

    async def hold(self) -> None:
        """Renews the lease until it is cancelled. Raises LeaseLost when it can't."""
        while True:
            await asyncio.sleep(self._terms.retry_s)
            left_s = self._terms.renew_s - (self._clock() - self._renewed_s)
            try:
                async with asyncio.timeout(left_s):
                    renewed = await self._try()
            except TimeoutError:
                renewed = False
            if not renewed and self._ended():
                self.leading = False
                raise LeaseLost(f"{self._identity} lost the lease {self._name}: it stops")

    def may_act(self) -> bool:
        """Returns whether no other candidate can lead yet, by this process's clock."""
        return self.leading and self._clock() - self._renewed_s < self._terms.renew_s

    def in_order(self) -> bool:
        """Returns whether this candidate leads, or has lately seen the leader."""
        return self.may_act() or self._clock() - self._heard_s < self._terms.lease_s

    async def release(self) -> None:
        """Lets another candidate lead at once; does nothing if this candidate does not lead."""
        if not self.leading:
            return
        self.leading = False
        for _ in range(RELEASE_TRIES):
            try:
                lease = await self._kube.get("Lease", self._namespace, self._name)
                if lease is not None and _holder(lease) == self._identity:
                    spec = {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
                    await self._kube.replace({**lease, "spec": spec})
                return
            except MillraceError as error:  # perhaps the last renewal was still in flight
                log.warning("the lease %s is not released yet: %s", self._name, error)

    def _ended(self) -> bool:
        lost = self._lease is not None and _holder(self._lease) != self._identity
        return lost or self._clock() - self._renewed_s >= self._terms.renew_s

    async def _try(self) -> bool:
        """Takes or renews the lease if it is free. Raises KubeRefused."""
        asked_s = self._clock()  # a term counts from before the call
        try:
            lease = await self._kube.get("Lease", self._namespace, self._name)
            if lease is None:
                self._see(await self._kube.create(self._record(None)))
            else:
                self._see(lease)
                if not self._free(lease):
                    return False
                self._see(await self._kube.replace(self._record(lease)))
        except KubeError as error:
            if error.status != 409:  # 409: another candidate was faster
                log.warning("the lease %s: %s", self._name, error)
            return False
        self._renewed_s = asked_s
        return True

    def _see(self, lease: dict[str, Any]) -> None:
        self._heard_s = self._clock()
        if self._lease is None or lease.get("spec") != self._lease.get("spec"):
            self._changed_s = self._clock()
        self._lease = lease

    def _free(self, lease: Mapping[str, Any]) -> bool:
        if _holder(lease) in ("", self._identity):
            return True
        duration_s = lease["spec"].get("leaseDurationSeconds", self._terms.lease_s)
        return bool(self._clock() - self._changed_s > duration_s)

    def _record(self, lease: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns the lease with this candidate as its holder."""
        now = micro_time()
        spec: dict[str, Any] = dict(lease.get("spec") or {}) if lease else {}
        if _holder(lease or {}) != self._identity:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = spec.get("leaseTransitions", -1) + 1
        spec |= {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(round(self._terms.lease_s), 1),
            "renewTime": now,
        }
        if lease:
            return {**lease, "spec": spec}
        return {
            "apiVersion": RESOURCES["Lease"].api_version,
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": spec,
        }


def _holder(lease: Mapping[str, Any]) -> str:
    return (lease.get("spec") or {}).get("holderIdentity") or ""
