"""The calls that autoscalers make to a live scheduler, over real streams."""

from __future__ import annotations

import pytest

from millrace.core.autoscale.load import FleetLoad
from millrace.sim.replay import replay
from millrace.wire.clients import scheduler_client as client
from millrace.wire.clients.scheduler_client import (
    InstanceView,
    SchedulerUnavailable,
    UnknownInstance,
)
from millrace.wire.pb import scheduler_pb2
from support.live_stack import eventually
from support.scheduler_peers import Net, Proxy, quick, scheduler, spec


async def held(net: Net) -> dict[str, int]:
    return {one.id: one.held_requests for one in await client.get_instances(net.address)}


async def placed(net: Net, proxy: Proxy, request_id: str, **slo: float) -> None:
    wanted = spec(request_id)
    for name, value in slo.items():
        setattr(wanted.slo, name, value)
    await proxy.submit(wanted)
    await proxy.next("placed")


async def test_load_has_every_signal_that_was_measured():
    async with scheduler() as net:
        prefill, decode = await net.worker("p0"), await net.worker("d0", beats=False)
        proxy = await net.proxy()
        load = await client.get_load(net.address)
        assert load.of("prefill").backlog_s == 0.0 and load.of("prefill").ttft_slo_ratio is None
        await placed(net, proxy, "r", ttft_s=10.0, tbt_s=0.1)
        load = await client.get_load(net.address)
        assert load.of("prefill").backlog_s == pytest.approx(0.1)
        assert 0.0 < load.of("prefill").arriving <= 0.02
        assert load.of("decode").kv_utilisation == pytest.approx(0.08)
        assert (load.of("decode").ready, load.of("decode").active_requests) == (1, 1)
        await prefill.computed("r")
        await prefill.released("r")
        await decode.decoding("r")
        await decode.say(heartbeat=scheduler_pb2.Heartbeat(running=1, tbt_s=0.05))

        async def paced() -> bool:
            return (await client.get_load(net.address)).of("decode").tbt_slo_ratio is not None

        await eventually(paced, what="the time between tokens was not heard")
        load = await client.get_load(net.address)
        assert load.of("decode").tbt_slo_ratio == pytest.approx(0.5)
        assert 0.0 < load.of("prefill").ttft_slo_ratio < 1.0
        assert load.of("prefill").backlog_s == 0.0 and load.of("prefill").active_requests == 0
        assert load.of("kvp").contexts == ()


async def test_parked_requests_are_those_of_all_proxies_that_are_there():
    async with scheduler() as net:
        first, second = await net.proxy("x"), await net.proxy("y")

        async def parks(proxy: Proxy, count: int) -> None:
            said = scheduler_pb2.ProxyLoad(parked_requests=count)
            await proxy.call.write(scheduler_pb2.ProxyMessage(load=said))

        async def parked() -> int:
            return (await client.get_load(net.address)).parked_requests

        async def are(count: int) -> None:
            async def holds() -> bool:
                return await parked() == count

            await eventually(holds, what=f"{count} parked requests, not {await parked()}")

        await parks(first, 2)
        await parks(second, 5)
        await are(7)
        await parks(first, 1)
        await are(6)
        await second.cut()
        await are(1)
        await parks(first, 0)
        await are(0)


async def test_instances_are_seen_with_what_they_hold():
    async with scheduler() as net:
        prefill, decode = await net.worker("p0"), await net.worker("d0")
        proxy = await net.proxy()
        await placed(net, proxy, "r")
        assert await held(net) == {"p0": 1, "d0": 1}
        (view,) = [one for one in await client.get_instances(net.address) if one.id == "d0"]
        assert view == InstanceView(
            id="d0",
            role="decode",
            address="127.0.0.1:d0",
            draining=False,
            running=view.running,
            waiting=0,
            held_requests=1,
            total_pages=100,
            free_pages=92,
        )
        await proxy.cancel("r")
        await prefill.next("run_prefill")
        await prefill.next("cancel")
        assert await held(net) == {"p0": 1, "d0": 1}  # until they say that the pages are free
        await prefill.released("r")
        await decode.released("r", attempt=1)

        async def free() -> bool:
            return await held(net) == {"p0": 0, "d0": 0}

        await eventually(free, what="what was released is still held")


async def test_a_cordon_and_its_end_reach_proxies_and_placement():
    async with scheduler() as net:
        await net.worker("p0")
        decodes = {name: await net.worker(name) for name in ("d0", "d1")}
        proxy = await net.proxy()
        await client.set_cordon(net.address, "d0", True)
        assert (await proxy.next("fleet")).ready
        draining = {one.id: one.draining for one in await client.get_instances(net.address)}
        assert draining == {"p0": False, "d0": True, "d1": False}
        await placed(net, proxy, "a")
        assert (await decodes["d1"].next("admit_decode")).admit_decode.request.request_id == "a"
        await client.set_cordon(net.address, "d1", True)
        fleet = await proxy.next("fleet")
        assert not fleet.ready and len(fleet.decode) == 2  # their streams stay open
        await client.set_cordon(net.address, "d0", False)
        assert (await proxy.next("fleet")).ready
        await placed(net, proxy, "b")
        assert (await decodes["d0"].next("admit_decode")).admit_decode.request.request_id == "b"


async def test_a_lifted_cordon_does_not_call_back_one_that_leaves():
    async with scheduler() as net:
        await net.worker("p0")
        decode = await net.worker("d0")
        proxy = await net.proxy()
        await decode.say(draining=scheduler_pb2.Draining())
        assert not (await proxy.next("fleet")).ready
        await client.set_cordon(net.address, "d0", False)
        assert not (await proxy.next("fleet")).ready
        assert [one.draining for one in await client.get_instances(net.address)] == [False, True]


@pytest.mark.parametrize("abort", [True, False])
async def test_an_evicted_instance_is_told_and_gets_nothing_new(abort):
    async with scheduler() as net:
        await net.worker("p0")
        decode, other = await net.worker("d0"), await net.worker("d1")
        proxy = await net.proxy()
        await client.evict(net.address, "d0", abort=abort)
        assert (await decode.next("drain")).drain == scheduler_pb2.Drain(abort=abort)
        await placed(net, proxy, "a")
        assert (await other.next("admit_decode")).admit_decode.request.request_id == "a"
        draining = {one.id: one.draining for one in await client.get_instances(net.address)}
        assert draining == {"p0": False, "d0": True, "d1": False}


async def test_what_an_evicted_instance_lets_go_of_is_prefilled_for_another():
    async with scheduler() as net:
        first = await net.worker("p0")
        decode = await net.worker("d0")
        proxy = await net.proxy()
        await placed(net, proxy, "a")
        await first.next("run_prefill")
        second = await net.worker("p1")
        await client.evict(net.address, "p0", abort=False)
        await first.next("drain")
        failed = scheduler_pb2.RequestFailed(request_id="a", message="evicted", retryable=True)
        await first.say(request_failed=failed)
        await first.released("a")
        # Decode gets the next attempt once it has released the previous attempt.
        await decode.next("admit_decode")
        await decode.next("cancel")
        await decode.released("a", attempt=1)
        assert (await second.next("run_prefill")).run_prefill.request.request_id == "a"


async def test_nobody_of_that_name():
    async with scheduler() as net:
        await net.worker("p0")
        for call in (
            client.set_cordon(net.address, "p9", True),
            client.set_cordon(net.address, "", False),
            client.evict(net.address, "p9", abort=False),
        ):
            with pytest.raises(UnknownInstance, match=r"no instance '.*' is registered"):
                await call
        assert [one.draining for one in await client.get_instances(net.address)] == [False]


async def test_without_a_scheduler_every_call_says_so():
    async with scheduler() as net:
        address = net.address
    for call in (
        client.get_load(address),
        client.get_instances(address),
        client.set_cordon(address, "p0", True),
        client.evict(address, "p0", abort=True),
    ):
        with pytest.raises(SchedulerUnavailable, match=f"no scheduler at {address}"):
            await call


async def test_a_scheduler_without_instances_has_a_load():
    async with scheduler() as net:
        load = await client.get_load(net.address)
        assert isinstance(load, FleetLoad)
        assert {role: pool.ready for role, pool in load.pools.items()} == {
            "prefill": 0,
            "decode": 0,
            "kvp": 0,
        }
        assert load.of("decode").kv_utilisation is None


async def test_a_recorded_run_with_cordons_is_replayed(tmp_path):
    path = tmp_path / "run.jsonl"
    async with scheduler(
        quick(policy="fcfs", preemption="none", tasks_ahead=1), record=path
    ) as net:
        prefill = await net.worker("p0")
        for name in ("d0", "d1"):
            await net.worker(name)
        proxy = await net.proxy()
        for number in range(6):
            await placed(net, proxy, f"r{number}")
        await prefill.computed("r0")
        await client.set_cordon(net.address, "d0", True)
        await client.set_cordon(net.address, "d0", False)
        await client.evict(net.address, "d1", abort=False)
    text = path.read_text()
    assert text.count('"InstanceCordoned"') == 3
    assert "decode d0 takes no new work" in text
    result = replay(path)
    assert result.agrees, str(result.difference)
