"""The live scheduler over real streams: the test plays its peers."""

from __future__ import annotations

import asyncio
import signal
import time

import grpc
import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.priority import POLICIES
from millrace.scheduler.leadership import LeadershipLost
from millrace.wire.pb import common_pb2, scheduler_pb2
from support.deadlines import HANG_S
from support.live_stack import eventually
from support.scheduler_peers import quick, register, scheduler, spec


async def test_a_request_is_placed_dispatched_and_finished():
    async with scheduler() as net:
        prefill, decode = await net.worker("p0"), await net.worker("d0")
        proxy = await net.proxy()
        wanted = spec("r", 100)
        await proxy.submit(wanted)
        placed = await proxy.next("placed")
        assert placed.request_id == "r"
        assert placed.decode.incarnation == common_pb2.Incarnation(id="d0", generation=1)
        assert placed.decode.address == "127.0.0.1:d0"
        assert placed.predicted_ttft_s == pytest.approx(0.1)
        assert (await decode.next("admit_decode")).admit_decode.request == wanted
        run = (await prefill.next("run_prefill")).run_prefill
        assert run.request == wanted
        assert run.decode.address == "127.0.0.1:d0" and run.decode.incarnation.id == "d0"
        assert [(c.start_token, c.num_tokens) for c in run.chunks] == [(0, 100)]
        status = await net.status()
        assert (status.queued, status.prefilling, status.decoding) == (0, 1, 0)
        assert {i.incarnation.id: i.free_pages for i in status.instances} == {"p0": 93, "d0": 92}
        await prefill.computed("r")
        await prefill.released("r")
        await decode.decoding("r")
        await eventually(lambda: _counts(net, (0, 0, 1)), what="the request never decoded")
        await decode.finished("r")
        await eventually(lambda: _counts(net, (0, 0, 0)), what="the request never ended")
        assert [i.free_pages for i in (await net.status()).instances] == [100, 100]


async def test_a_request_of_a_former_leader_gets_an_attempt_of_its_own():
    """The store has lost its data: the scheduler knows of no former leader, but its proxies do."""
    before_s = int(time.time())
    async with scheduler() as net:
        await net.worker("p0")
        decode, proxy = await net.worker("d0"), await net.proxy()
        opened = scheduler_pb2.OpenRequest(request=spec("former"), age_s=1.0)
        await proxy.call.write(scheduler_pb2.ProxyMessage(open=opened))
        await proxy.submit(spec("new"))
        admitted = [(await decode.next("admit_decode")).admit_decode for _ in range(2)]
        attempts = {one.request.request_id: one.attempt for one in admitted}
        assert attempts["former"] > before_s and attempts["new"] == 1


async def test_a_request_without_a_place_is_said_to_wait():
    async with scheduler() as net:
        prefill = await net.worker("p0", kv_pages=1000)
        decode = await net.worker("d0", kv_pages=10)
        proxy = await net.proxy()
        await proxy.submit(spec("first"), spec("second"))
        assert (await proxy.next("placed")).request_id == "first"
        assert (await proxy.next("queued")).request_id == "second"
        await prefill.computed("first")
        await prefill.released("first")
        await decode.decoding("first")
        await decode.finished("first")
        assert (await proxy.next("placed")).request_id == "second"


async def test_a_proxy_hears_how_far_its_prompts_are():
    async with scheduler() as net:
        prefill = await net.worker("p0", kv_pages=1000)
        decode = await net.worker("d0", kv_pages=10)
        proxy, other = await net.proxy(), await net.proxy("y")
        ask = scheduler_pb2.AskProgress(request_ids=["first", "second", "unheard-of"])
        await proxy.submit(spec("first"), spec("second"))
        await proxy.next("placed")
        await proxy.next("queued")
        await other.call.write(scheduler_pb2.ProxyMessage(ask=ask))  # of another proxy's requests
        heard = [await other.next("progress"), await other.next("progress")]
        assert [one.request_id for one in heard] == ["first", "second"]
        await proxy.call.write(scheduler_pb2.ProxyMessage(ask=ask))
        first, second = await proxy.next("progress"), await proxy.next("progress")
        assert (first.prompt.queue_place, second.prompt.queue_place) == (1, 1)
        assert (first.request_id, first.prompt.computed_tokens) == ("first", 0)
        assert first.prompt.state == scheduler_pb2.REQUEST_STATE_PREFILLING
        assert 0.0 <= first.prompt.left_s <= 0.1  # as placed: 100 tokens of 1 ms
        assert (second.request_id, second.prompt.state) == (
            "second",
            scheduler_pb2.REQUEST_STATE_QUEUED,
        )
        assert not second.prompt.HasField("left_s")  # it has no place
        landed = scheduler_pb2.PrefixLanded(request_id="first", attempt=1, tokens=40)
        await decode.say(prefix_landed=landed)
        while (await _asked(proxy, "first")).prompt.computed_tokens != 40:
            pass
        await prefill.computed("first")
        await prefill.released("first")
        await decode.decoding("first")
        await decode.finished("first")
        await proxy.next("placed")
        await proxy.call.write(scheduler_pb2.ProxyMessage(ask=ask))
        assert (await proxy.next("progress")).request_id == "second"  # alone


async def _asked(proxy, request_id: str) -> scheduler_pb2.Progress:
    ask = scheduler_pb2.AskProgress(request_ids=[request_id])
    await proxy.call.write(scheduler_pb2.ProxyMessage(ask=ask))
    return await proxy.next("progress")


async def _counts(net, wanted: tuple[int, int, int]) -> bool:
    status = await net.status()
    return (status.queued, status.prefilling, status.decoding) == wanted


async def test_proxies_hear_of_every_change_of_the_fleet():
    async with scheduler() as net:
        proxy = await net.proxy()
        await net.worker("p0")
        fleet = await proxy.next("fleet")
        assert (len(fleet.decode), fleet.ready) == (0, False)
        decode = await net.worker("d0")
        fleet = await proxy.next("fleet")
        assert fleet.ready and [m.address for m in fleet.decode] == ["127.0.0.1:d0"]
        await decode.say(draining=scheduler_pb2.Draining())
        fleet = await proxy.next("fleet")
        assert not fleet.ready and len(fleet.decode) == 1  # its streams must stay open
        await decode.cut()
        fleet = await proxy.next("fleet")
        assert not fleet.decode


async def test_a_cut_prefill_stream_sends_its_requests_elsewhere():
    async with scheduler() as net:
        first = await net.worker("p0")
        decodes = {name: await net.worker(name) for name in ("d0", "d1")}
        proxy = await net.proxy()
        await proxy.submit(spec("r"))
        placed = await proxy.next("placed")
        await first.next("run_prefill")
        second = await net.worker("p1")
        await first.cut()
        old = decodes.pop(placed.decode.incarnation.id)
        await old.next("admit_decode")
        assert (await old.next("cancel")).cancel.request_id == "r"
        (new,) = decodes.values()
        assert (await proxy.next("placed")).decode.incarnation.id == new.id
        assert (await new.next("admit_decode")).admit_decode.request.request_id == "r"
        run = (await second.next("run_prefill")).run_prefill
        assert run.decode.incarnation.id == new.id
        assert run.request.traceparent == "00-1-2-01"


async def test_a_cut_decode_stream_after_the_first_token_fails_the_request():
    async with scheduler() as net:
        prefill, decode = await net.worker("p0"), await net.worker("d0")
        proxy = await net.proxy()
        await proxy.submit(spec("r"))
        await proxy.next("placed")
        await prefill.next("run_prefill")
        await prefill.computed("r")
        await eventually(lambda: _free_slot(net), what="the chunk's end was not heard")
        await decode.cut()
        failed = await proxy.next("failed")
        assert failed.request_id == "r" and "decode d0 died after the first token" in failed.message
        assert (await prefill.next("cancel")).cancel.request_id == "r"


async def _free_slot(net) -> bool:
    return all(i.queue_s == 0.0 for i in (await net.status()).instances)


async def test_a_silent_worker_is_taken_for_dead_when_its_lease_lapses():
    async with scheduler(quick(lease_s=0.5)) as net:
        silent = await net.worker("p0", beats=False)
        decode = await net.worker("d0")
        proxy = await net.proxy()
        await proxy.submit(spec("r"))
        await proxy.next("placed")
        await silent.next("run_prefill")
        start_s = time.monotonic()
        assert (await decode.next("admit_decode")).admit_decode.request.request_id == "r"
        assert (await decode.next("cancel")).cancel.reason == "prefill p0 died"
        assert time.monotonic() - start_s > 0.2  # the lease was given its time
        with pytest.raises(grpc.aio.AioRpcError, match="silent for"):
            await silent.read()
        await decode.released("r", attempt=1)
        other = await net.worker("p1")
        assert (await proxy.next("placed")).decode.incarnation.id == "d0"
        assert (await other.next("run_prefill")).run_prefill.request.request_id == "r"


async def test_a_worker_that_speaks_keeps_its_lease():
    async with scheduler(quick(lease_s=2.0)) as net:  # forty heartbeats
        await net.worker("d0")
        await asyncio.sleep(2.5)
        assert [i.incarnation.id for i in (await net.status()).instances] == ["d0"]


async def test_a_worker_that_registers_again_is_a_new_life():
    async with scheduler() as net:
        first, decode = await net.worker("p0", beats=False), await net.worker("d0")
        proxy = await net.proxy()
        await proxy.submit(spec("r"))
        await proxy.next("placed")
        await first.next("run_prefill")
        second = await net.worker("p0")  # the same generation: its connection broke
        await decode.next("admit_decode")
        await decode.next("cancel")
        with pytest.raises(grpc.aio.AioRpcError, match="p0 registered again"):
            await first.read()
        await decode.released("r", attempt=1)
        assert (await second.next("run_prefill")).run_prefill.request.request_id == "r"
        late = net.stub().ConnectWorker()
        old = scheduler_pb2.WorkerMessage(register=register("p0", generation=0))
        await late.write(old)
        with pytest.raises(grpc.aio.AioRpcError, match="a later incarnation of p0 is registered"):
            await late.read()


async def test_a_cut_proxy_stream_cancels_its_requests_and_no_others():
    async with scheduler() as net:
        prefill, decode = await net.worker("p0"), await net.worker("d0")
        gone, stays = await net.proxy("x"), await net.proxy("y")
        await gone.submit(spec("r"))
        await gone.next("placed")
        await stays.submit(spec("s"))
        await stays.next("placed")
        await gone.cut()
        for worker, before in ((prefill, "run_prefill"), (decode, "admit_decode")):
            await worker.next(before)
            await worker.next(before)
            cancel = (await worker.next("cancel")).cancel
            assert (cancel.request_id, cancel.reason) == ("r", "its proxy left")
        await eventually(lambda: _counts(net, (0, 1, 0)), what="the other proxy's request is gone")


async def test_a_cancel_reaches_both_instances():
    async with scheduler() as net:
        prefill, decode = await net.worker("p0"), await net.worker("d0")
        proxy = await net.proxy()
        await proxy.submit(spec("r"))
        await proxy.next("placed")
        await proxy.cancel("r")
        await prefill.next("run_prefill")
        await decode.next("admit_decode")
        assert (await prefill.next("cancel")).cancel.request_id == "r"
        assert (await decode.next("cancel")).cancel.request_id == "r"


async def test_a_proxy_cancels_no_request_of_another_one():
    async with scheduler() as net:
        await net.worker("p0")
        await net.worker("d0")
        first, second = await net.proxy("x"), await net.proxy("y")
        await first.submit(spec("r"))
        await first.next("placed")
        await second.cancel("r")
        await second.submit(spec("s"))
        await second.next("placed")  # and the cancel was read before
        assert await _counts(net, (0, 2, 0))
        await first.cancel("r")
        await eventually(lambda: _counts(net, (0, 1, 0)), what="its own proxy's cancel ends it")


async def test_every_policy_is_served():
    async with scheduler(quick(policy="edf")) as net:
        prefill = await net.worker("p0")
        await net.worker("d0")
        proxy = await net.proxy()
        loose, tight = spec("loose"), spec("tight")
        loose.slo.ttft_s, tight.slo.ttft_s = 50, 10
        await proxy.submit(spec("first"), loose, tight)
        for request_id in ("first", "loose", "tight"):
            run = (await prefill.next("run_prefill")).run_prefill
            assert run.request.request_id == request_id
        queue = (await prefill.next("order")).order.queue
        assert [[ref.request_id for ref in entry.chunks] for entry in queue] == [
            ["first"],
            ["tight"],
            ["loose"],
        ]


TWICE_AS_FAST = scheduler_pb2.SpLatency(
    by_sp={1: scheduler_pb2.Latency(b=1e-3), 2: scheduler_pb2.Latency(b=5e-4)}
)


async def test_a_groups_members_are_told_of_each_other():
    async with scheduler(quick(planner="esp")) as net:
        card = {"latency": TWICE_AS_FAST, "node": "n", "kv_layers": 4}
        members = [await net.worker(name, generation=7, **card) for name in ("p0", "p1")]
        decode = await net.worker("d0")
        proxy = await net.proxy()
        await proxy.submit(spec("r", 320))
        assert (await decode.next("admit_decode")).admit_decode.attempt == 1
        for member in members:
            run = (await member.next("run_prefill")).run_prefill
            assert run.attempt == 1 and list(run.chunks[0].instance_ids) == ["p0", "p1"]
            told = [(m.incarnation.id, m.incarnation.generation, m.address) for m in run.group]
            assert told == [("p0", 7, "127.0.0.1:p0"), ("p1", 7, "127.0.0.1:p1")]
        status = {one.incarnation.id: one for one in (await net.status()).instances}
        assert status["p0"].free_pages == 100 - (10 + 2 * 3)  # a share, and buffers of 10 / 4 pages


async def test_a_lost_member_costs_what_has_not_landed():
    async with scheduler(quick(planner="esp")) as net:
        lost, kept = [await net.worker(p, latency=TWICE_AS_FAST) for p in ("p1", "p0")]
        decode = await net.worker("d0", beats=False)
        proxy = await net.proxy()
        await proxy.submit(spec("r", 320, prompt_logprobs=-1))
        await kept.next("run_prefill")
        await decode.next("admit_decode")
        landed = scheduler_pb2.PrefixLanded(request_id="r", attempt=1, tokens=200)
        await decode.say(prefix_landed=landed)
        await decode.say(heartbeat=scheduler_pb2.Heartbeat(running=77))

        async def heard() -> bool:
            return 77 in [one.running for one in (await net.status()).instances]

        await eventually(heard, what="what decode said was not heard")
        await lost.cut()
        assert (await kept.next("cancel")).cancel.request_id == "r"
        again = (await decode.next("admit_decode")).admit_decode
        assert (again.attempt, again.kept_tokens) == (2, 200)
        await kept.released("r")
        run = (await kept.next("run_prefill")).run_prefill
        assert run.attempt == 2
        assert [(c.start_token, c.num_tokens) for c in run.chunks] == [(200, 120)]


async def test_the_improvement_rate_is_changed_while_it_runs():
    async with scheduler(quick(planner="single_chunk", improvement_rate=0.9)) as net:
        workers = [await net.worker(name, latency=TWICE_AS_FAST) for name in ("p0", "p1")]
        await net.worker("d0")
        proxy = await net.proxy()
        wanted = scheduler_pb2.SetImprovementRateRequest(rate=0.1)
        reply = await net.stub().SetImprovementRate(wanted)
        assert (reply.before, reply.now) == (0.9, 0.1)
        await proxy.submit(spec("r", 320))
        for worker in workers:
            assert (await worker.next("run_prefill")).run_prefill.request.request_id == "r"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await net.stub().SetImprovementRate(scheduler_pb2.SetImprovementRateRequest())
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "neither rate nor rates" in (refused.value.details() or "")


async def test_the_policy_is_changed_while_requests_wait():
    async with scheduler(quick(policy="fcfs", preemption="none")) as net:
        prefill = await net.worker("p0")
        await net.worker("d0")
        proxy = await net.proxy()
        loose, tight = spec("loose"), spec("tight")
        loose.slo.ttft_s, tight.slo.ttft_s = 50, 10
        await proxy.submit(spec("first"), loose, tight)
        for request_id in ("first", "loose"):  # its slots
            run = (await prefill.next("run_prefill")).run_prefill
            assert run.request.request_id == request_id
        assert (await net.status()).policy == "fcfs"
        reply = await net.stub().SetPolicy(scheduler_pb2.SetPolicyRequest(policy="edf"))
        assert (reply.before, reply.now) == ("fcfs", "edf")
        run = (await prefill.next("run_prefill")).run_prefill
        assert run.request.request_id == "tight"
        queue = (await prefill.next("order")).order.queue
        assert [entry.chunks[0].request_id for entry in queue] == ["first", "tight", "loose"]
        status = await net.status()
        assert (status.policy, status.planner) == ("edf", "auto")
        assert status.preemption == scheduler_pb2.PREEMPTION_NONE
        assert list(status.policies) == list(POLICIES)


@pytest.mark.parametrize("name", ["", "sjf"])
async def test_an_unknown_policy_is_refused_and_changes_nothing(name):
    async with scheduler() as net:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await net.stub().SetPolicy(scheduler_pb2.SetPolicyRequest(policy=name))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == (
            f"policy is {name!r}; it must be one of {', '.join(POLICIES)}"
        )
        assert (await net.status()).policy == SchedulerConfig().policy


async def test_refusals_say_why():
    async with scheduler() as net:
        proxy = await net.proxy()
        await proxy.submit(spec("early"))
        assert (await proxy.next("refused")).code == scheduler_pb2.REFUSAL_CODE_UNAVAILABLE
        await net.worker("p0")
        await net.worker("d0")
        await proxy.submit(spec("huge", 3000), spec("none", 0), spec("no-choice", n=0), spec("ok"))
        refused = [await proxy.next("refused") for _ in range(3)]
        assert {r.request_id: r.code for r in refused} == {
            "huge": scheduler_pb2.REFUSAL_CODE_TOO_LARGE,
            "none": scheduler_pb2.REFUSAL_CODE_INVALID,
            "no-choice": scheduler_pb2.REFUSAL_CODE_INVALID,
        }
        messages = {r.request_id: r.message for r in refused}
        assert messages["none"] == "prompt_tokens is 0; it must be at least 1"
        assert messages["no-choice"] == "sampling.n is 0; it must be at least 1"
        assert (await proxy.next("placed")).request_id == "ok"


@pytest.mark.parametrize(
    "message, complaint",
    [
        ({"heartbeat": scheduler_pb2.Heartbeat()}, "a worker must register first"),
        ({"register": register("p0", role="unspecified")}, "role is 0; it must be prefill or dec"),
        ({"register": register("p0", kv_pages=0)}, "kv_pages is 0; it must be at least 1"),
        ({"register": register("d0", max_batch=0)}, "max_batch is 0; it must be at least 1"),
        ({"register": register("p0", model_hash="")}, "model_hash is ''; it must be not empty"),
        (
            {"register": register("p0", latency={"by_sp": {1: scheduler_pb2.Latency(b=-1)}})},
            "latency.by_sp[1].b is -1.0; it must be finite and 0 or more",
        ),
    ],
)
async def test_a_worker_that_makes_no_sense_is_told_so(message, complaint):
    async with scheduler() as net:
        call = net.stub().ConnectWorker()
        await call.write(scheduler_pb2.WorkerMessage(**message))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), HANG_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert complaint in caught.value.details()
        assert not (await net.status()).instances


@pytest.mark.parametrize("is_worker", [True, False])
async def test_a_peer_that_has_seen_a_later_epoch_ends_the_leader(is_worker):
    """The store has lost its data: peers that have seen the epochs before refuse this one."""
    seen = (int(time.time()) + 5) * 1000
    with pytest.raises(LeadershipLost, match=f"a peer has seen epoch {seen}"):
        async with scheduler() as net:
            connect = net.stub().ConnectWorker if is_worker else net.stub().ConnectProxy
            for ahead, code in (
                (seen + 2 * 24 * 3600_000, grpc.StatusCode.INVALID_ARGUMENT),  # no epoch at all
                (seen, grpc.StatusCode.UNAVAILABLE),
            ):
                call = connect()
                if is_worker:
                    register_ = register("p0")
                    first = scheduler_pb2.WorkerMessage(register=register_, seen_epoch=ahead)
                else:
                    hello = common_pb2.Incarnation(id="x", generation=1)
                    first = scheduler_pb2.ProxyMessage(hello=hello, seen_epoch=ahead)
                await call.write(first)
                with pytest.raises(grpc.aio.AioRpcError, match=str(ahead)) as caught:
                    await asyncio.wait_for(call.read(), HANG_S)
                assert caught.value.code() is code
            await asyncio.wait([net.task], timeout=HANG_S)


@pytest.mark.parametrize(
    ("knows", "code"), [("prefill", "UNAVAILABLE"), ("proxy", "UNAVAILABLE"), ("", "TOO_LARGE")]
)
async def test_no_request_is_too_large_for_a_fleet_that_the_store_has_forgotten(knows, code):
    """The store has lost its data: a peer had a former leader, which may have had more peers."""
    seen = {knows: (int(time.time()) - 60) * 1000}
    async with scheduler() as net:
        await net.worker("p0", seen_epoch=seen.get("prefill", 0))
        await net.worker("d0")
        proxy = await net.proxy(seen_epoch=seen.get("proxy", 0))
        await proxy.submit(spec("r", 4000))
        refused = await proxy.next("refused")
        assert scheduler_pb2.RefusalCode.Name(refused.code) == f"REFUSAL_CODE_{code}"


async def test_peers_that_lose_the_thread_are_cut_off_alone():
    async with scheduler(quick(lease_s=2.0)) as net:
        worker, proxy = await net.worker("p0"), await net.proxy()
        await worker.fall_silent()
        await worker.say(register=register("p0"))
        with pytest.raises(grpc.aio.AioRpcError, match="a registered worker sent register"):
            await worker.read()
        await proxy.next("fleet")
        assert not (await net.status()).instances
        await proxy.call.write(scheduler_pb2.ProxyMessage())
        with pytest.raises(grpc.aio.AioRpcError, match="a connected proxy sent nothing"):
            await proxy.next("placed")
        silent = net.stub().ConnectProxy()
        with pytest.raises(grpc.aio.AioRpcError, match=r"a proxy must send hello\.id first"):
            await asyncio.wait_for(silent.read(), HANG_S)


async def test_sigterm_ends_the_streams_and_leaves_the_work_to_the_next_leader():
    async with scheduler() as net:
        # A heartbeat in the moment of the end would break its stream.
        prefill, decode = [await net.worker(one, beats=False) for one in ("p0", "d0")]
        proxy = await net.proxy()
        await proxy.submit(spec("r"))
        await proxy.next("placed")
        await prefill.next("run_prefill")
        await decode.next("admit_decode")
        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(asyncio.shield(net.task), HANG_S)
        for peer in (prefill, decode, proxy):
            assert await peer.read() is grpc.aio.EOF  # no cancel


async def test_many_requests_from_two_proxies_all_end_once():
    async with scheduler() as net:
        prefills = [await net.worker(f"p{i}") for i in range(2)]
        decodes = [await net.worker(f"d{i}") for i in range(2)]
        proxies = [await net.proxy(name) for name in ("x", "y")]
        count = 100

        async def prefill(worker) -> None:
            while True:
                command = await worker.next()
                if command.WhichOneof("kind") == "order":
                    continue  # it computes what it was sent before it reads on
                request_id = command.run_prefill.request.request_id
                await worker.computed(request_id)
                await worker.released(request_id)
                target = command.run_prefill.decode.incarnation.id
                decode = next(d for d in decodes if d.id == target)
                await decode.decoding(request_id)
                await decode.finished(request_id)

        async def admitted(worker, seen: set[str]) -> None:
            while True:
                seen.add((await worker.next("admit_decode")).admit_decode.request.request_id)

        seen: set[str] = set()
        tasks = [asyncio.create_task(prefill(worker)) for worker in prefills]
        tasks += [asyncio.create_task(admitted(worker, seen)) for worker in decodes]
        for proxy in proxies:
            await proxy.submit(*(spec(f"{proxy.id}{i}", 40) for i in range(count)))
        placed = {(await p.next("placed")).request_id for p in proxies for _ in range(count)}
        assert placed == {f"{name}{i}" for name in "xy" for i in range(count)}
        await eventually(lambda: _counts(net, (0, 0, 0)), what="some request never ended")
        assert seen == placed
        assert all(i.free_pages == 100 for i in (await net.status()).instances)
        for task in tasks:
            assert not task.done()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
