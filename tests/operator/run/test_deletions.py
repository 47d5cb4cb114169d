"""An object deleted during its pass: the operator makes nothing more for it.

The deletion comes before every third request of the pass in turn; before each one in slow tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from kmock import Request

from millrace.core.errors import MillraceError
from millrace_operator.run.kube import Kube
from millrace_operator.run.queue import Key
from millrace_operator.run.runner import Runner
from support.custom_objects import service
from support.kube_emulator import KubeEmulator, configuration_of, kube_emulator
from support.kube_objects import Object
from support.single_passes import cluster_and_runner

SERVICE = Key("ModelService", "default", "chat")
POOL = Key("DecodePool", "default", "chat-decode")
OWNERS = ("ModelService", "PrefillGroup", "DecodePool")


@asynccontextmanager
async def runner(cluster: KubeEmulator) -> AsyncIterator[Runner]:
    kube = Kube(configuration_of(cluster), connections=8)
    try:
        yield cluster_and_runner(kube, "127.0.0.1:1")[1]
    finally:
        await kube.close()


def chat() -> Object:
    pool = {"gpus": 0, "autoscaling": {"mode": "Off"}}
    return service(redis={"secretRef": {"name": "redis"}}, prefill=pool, decode=pool)


async def change(cluster: KubeEmulator) -> None:
    """Every child has an owner to follow."""
    settings = {"engine.max_batch": "7"}
    await cluster.edit("ModelService", "chat", lambda o: o["spec"].update(settings=settings))


class Deletion:
    """Deletes the ModelService before request number `at`, and returns the objects made after
    it.
    """

    def __init__(self, cluster: KubeEmulator, at: int, *, again: bool) -> None:
        self.cluster, self.at, self.again = cluster, at, again
        self.dead = {obj["metadata"]["uid"] for kind in OWNERS for obj in cluster.all(kind)}
        self.requests = 0
        self.late: list[str] = []

    async def before(self, request: Request) -> None:
        self.requests += 1
        if self.requests == self.at:
            await self.cluster.remove("ModelService", "chat")
            if self.again:
                await self.cluster.make(chat())
        elif self.requests > self.at and request.method == "PATCH" and not request.subresource:
            assert request.resource is not None
            kind = self.cluster.resources[request.resource].kind
            if self.cluster.find(kind, request.name) is None and self.dead & owners(request.data):
                self.late.append(f"{kind} {request.name}")


def owners(obj: Object) -> set[str]:
    return {owner["uid"] for owner in obj["metadata"].get("ownerReferences", [])}


async def look(running: Runner, key: Key) -> float | None:
    try:
        return await running.reconcile(key)
    except MillraceError:  # the queue tries again
        return 0.0


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("key", "is_first"), [(SERVICE, True), (POOL, False)])
async def test_whatever_a_deletion_meets_no_child_of_the_dead_is_made(key, is_first, step):
    at = 1 - step
    async with kube_emulator() as cluster, runner(cluster) as running:
        while True:
            at += step
            await cluster.make(chat())
            if key == POOL or not is_first:
                await running.reconcile(SERVICE)
            if not is_first:
                await running.reconcile(key)
                await change(cluster)
            deletion = Deletion(cluster, at, again=at % 2 == 0)
            cluster.before = deletion.before
            await look(running, key)
            cluster.before = None
            if deletion.requests < at:
                break  # the pass ended before
            assert not deletion.late, f"made after a deletion before request {at}"
            for kind, _, name in cluster.names():
                assert not deletion.dead & owners(cluster.find(kind, name))
            if deletion.again:
                await cluster.remove("ModelService", "chat")
            for gone in (SERVICE, POOL):
                assert await look(running, gone) is None
            assert {kind for kind, *_ in cluster.names()} <= {"Event"}  # it outlives its object
    assert at > 8
