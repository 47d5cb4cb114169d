"""New templates and new model revisions, pod by pod, on a real API server."""

from __future__ import annotations

from collections.abc import Callable

from support.kube_api import Object, condition, soon
from support.operator_world import World, answer
from support.scheduler_peers import spec

TEMPLATE, REVISION = "millrace.dev/template", "millrace.dev/revision"


def label(pod: Object, name: str) -> str:
    return str(pod["metadata"]["labels"][name])


def serving(world: World, kind: str) -> dict[str, Object]:
    """Returns the pods that are ready and stay, by name."""
    return {
        name: pod
        for name, pod in world.pods(kind).items()
        if condition(pod, "Ready") == "True" and "deletionTimestamp" not in pod["metadata"]
    }


def changed(**environment: str) -> Object:
    """Changes only the template of a pool."""
    env = [{"name": name, "value": value} for name, value in environment.items()]
    return {"template": {"spec": {"containers": [{"name": "millrace", "env": env}]}}}


async def watched(done: Callable[[], bool], look: Callable[[], None]) -> None:
    """Waits until `done`, with a call of `look` before every check."""

    def looked() -> bool:
        look()
        return done()

    await soon(looked, 90.0, what="rolled out")


async def test_a_new_template_comes_one_pod_at_a_time(world: World) -> None:
    async with world.engines():
        await world.serve(decode={"replicas": 2})
        before = world.pods("DecodePool")
        old = {label(pod, TEMPLATE) for pod in before.values()}
        fewest = [2]
        world.apply(decode=changed(NEW="1"))

        def finished() -> bool:
            pods = world.pods("DecodePool")
            return pods.keys() == before.keys() and not old & {
                label(pod, TEMPLATE) for pod in pods.values()
            }

        await watched(finished, lambda: fewest.append(len(serving(world, "DecodePool"))))
        assert min(fewest) == 2  # an extra instance replaced each
        await world.settled()
    after = world.pods("DecodePool")
    assert all(
        after[name]["metadata"]["uid"] != pod["metadata"]["uid"] for name, pod in before.items()
    )
    assert world.pool("DecodePool")["status"]["updatedReadyReplicas"] == 2


async def test_a_pod_that_is_at_work_is_replaced_when_it_is_done(world: World) -> None:
    async with world.engines() as workers:
        await world.serve()
        await soon(lambda: workers.keys() == {"chat-prefill-0", "chat-decode-0"})
        busy = workers["chat-decode-0"]
        proxy = await world.net.proxy()
        await proxy.submit(spec("r"))
        await proxy.next("placed")
        uid = world.pods("DecodePool")["chat-decode-0"]["metadata"]["uid"]
        world.apply(decode=changed(NEW="1"))
        await soon(lambda: "chat-decode-1" in workers, what="the extra instance")
        await soon(lambda: condition(world.pool("DecodePool"), "Draining") == "True")
        (entry,) = world.pool("DecodePool")["status"]["draining"]
        assert (entry["pod"], entry["reason"]) == ("chat-decode-0", "Rollout")
        assert world.pods("DecodePool")["chat-decode-0"]["metadata"]["uid"] == uid
        await answer("r", workers["chat-prefill-0"], busy)
        await world.settled()
    (pod,) = world.pods("DecodePool").values()
    assert pod["metadata"]["uid"] != uid


async def test_a_new_revision_always_has_prefill_and_decode(world: World) -> None:
    async with world.engines():
        await world.serve(prefill={"replicas": 2})
        (old,) = {label(pod, REVISION) for pod in world.pods("DecodePool").values()}
        world.apply(model={"revision": "2"})

        def revisions(kind: str) -> set[str]:
            return {label(pod, REVISION) for pod in serving(world, kind).values()}

        def paired() -> None:
            assert revisions("PrefillGroup") & revisions("DecodePool"), "nobody serves a request"

        def finished() -> bool:
            pods = world.pods("PrefillGroup") | world.pods("DecodePool")
            return len(pods) == 3 and old not in {label(pod, REVISION) for pod in pods.values()}

        await watched(finished, paired)
        await world.settled()
    assert world.service()["status"]["revision"] != old
