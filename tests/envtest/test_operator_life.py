"""The operator stops and starts: deletion without it, restarts, two operators, CRD upgrades."""

from __future__ import annotations

import asyncio

from support.control_plane import ControlPlane
from support.custom_objects import crds, service
from support.kube_api import Api, condition, soon
from support.operator_process import START_S, OperatorProcess
from support.operator_world import World, answer
from support.releases import objects_of
from support.scheduler_peers import spec


async def nothing_left(world: World) -> None:
    """Returns the objects of the service `chat` that the garbage collector deletes."""
    await soon(lambda: not objects_of(world.plane, "chat", world.namespace), 60.0, what="left over")


async def test_a_deleted_service_takes_everything_along(controllers: None, world: World) -> None:
    await world.serve()
    assert len(objects_of(world.plane, "chat", world.namespace)) > 15
    world.api.delete(world.service())
    await nothing_left(world)


async def test_deletion_does_not_need_the_operator(controllers: None, world: World) -> None:
    await world.serve()
    world.operator.stop()
    world.api.delete(world.service())
    await nothing_left(world)


async def test_a_drain_goes_on_after_the_operator_died(world: World) -> None:
    await world.serve(decode={"replicas": 2})
    prefill = await world.worker("chat-prefill-0")
    leaving = await world.worker("chat-decode-1")
    proxy = await world.net.proxy()
    await proxy.submit(spec("r"))
    await proxy.next("placed")
    await world.worker("chat-decode-0")
    world.scale("DecodePool", 1)
    await soon(lambda: condition(world.pool("DecodePool"), "Draining") == "True")
    before = world.pool("DecodePool")["status"]["draining"]
    world.operator.kill()
    world.drop_lease()
    world.operator.start()
    await asyncio.to_thread(world.operator.wait_until_it_leads, 2)
    assert world.pool("DecodePool")["status"]["draining"] == before
    await answer("r", prefill, leaving)
    await soon(lambda: world.pods("DecodePool").keys() == {"chat-decode-0"}, what="pods")
    await world.settled()


async def test_the_next_operator_takes_over_when_the_leader_goes(world: World) -> None:
    await world.serve()
    second = OperatorProcess(
        world.plane, world.namespace, name="operator-1", scheduler=world.net.address
    )
    with second:
        await soon(second.ready, START_S, what="the second is ready:")
        world.scale("PrefillGroup", 2)
        await soon(lambda: len(world.pods("PrefillGroup")) == 2)
        assert not second.leads()
        world.operator.stop()
        await asyncio.to_thread(second.wait_until_it_leads)
        world.scale("PrefillGroup", 3)
        await soon(lambda: len(world.pods("PrefillGroup")) == 3)


async def test_a_dead_leaders_lease_runs_out(world: World) -> None:
    second = OperatorProcess(
        world.plane, world.namespace, name="operator-1", scheduler=world.net.address
    )
    with second:
        await soon(second.ready, START_S, what="the second is ready:")
        world.operator.kill()
        await asyncio.to_thread(second.wait_until_it_leads)
        world.apply()
        await soon(lambda: world.pods("PrefillGroup"))


async def test_the_operator_brings_its_crds_and_helm_may_follow(
    api: Api, plane: ControlPlane, namespace: str, release: None
) -> None:
    """Helm 4 applies the chart's CRDs at every install: no other manager may own their schemas."""
    ours = crds()[0]
    older = {**ours, "spec": {**ours["spec"], "names": {**ours["spec"]["names"], "categories": []}}}
    versions = [{**ours["spec"]["versions"][0], "additionalPrinterColumns": []}]
    older["spec"] |= {"versions": versions}
    api.apply(older, manager="helm", force=True)
    with OperatorProcess(plane, namespace) as operator:
        await asyncio.to_thread(operator.wait_until_it_leads)

        def upgraded() -> bool:
            found = api.get(ours["apiVersion"], ours["kind"], "", ours["metadata"]["name"])
            assert found is not None
            return bool(found["spec"]["versions"][0].get("additionalPrinterColumns"))

        await soon(upgraded)
        api.apply(older, manager="helm")  # no conflict
        api.apply(ours, manager="helm")
        api.apply(service("chat", namespace))
        await soon(lambda: api.get("v1", "ConfigMap", namespace, "chat-config"))
