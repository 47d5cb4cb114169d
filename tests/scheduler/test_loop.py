"""The loop without its streams: leases, metrics, events that never reach the machine."""

from __future__ import annotations

import asyncio
import typing
from contextlib import asynccontextmanager

import pytest

from millrace.core.config import SchedulerConfig, StoreConfig
from millrace.core.scheduler import effects
from millrace.core.scheduler.events import (
    InstanceLeft,
    PolicyChanged,
    ProxyLeft,
    Reopened,
    Submitted,
    TakeoverEnded,
)
from millrace.core.scheduler.reports import DecodeStarted, RequestFailed
from millrace.scheduler.loop import SchedulerLoop
from millrace.scheduler.peers import Proxy, Worker
from millrace.scheduler.recorder import Recorder
from millrace.scheduler.succession import Estate
from millrace.state.open import open_store
from millrace.telemetry.metrics import Registry
from millrace.wire.codec import scheduler as codec
from millrace.wire.codec.proxy import update_kind
from millrace.wire.fleet_messages import Fleet, SendRunPrefill
from millrace.wire.pb.common_pb2 import RequestSpec
from support.core_events import reported
from support.live_stack import eventually
from support.scheduler_peers import register, spec

IN_ORDER = {"policy": "fcfs", "preemption": "none"}


class Hand:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def running(clock, *, ticking: bool = False, estate: Estate | None = None, **scheduler):
    registry = Registry()
    recorder = Recorder(open_store(StoreConfig()))
    config = SchedulerConfig(heartbeat_s=0.02, lease_s=1.0, **scheduler)
    loop = SchedulerLoop(config, recorder, registry, clock, estate=estate)
    tasks = [asyncio.create_task(loop.run())]
    if ticking:
        tasks.append(asyncio.create_task(loop.tick()))
    try:
        yield loop, registry
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def join(loop: SchedulerLoop, worker_id: str, **card: object) -> Worker:
    message = register(worker_id, **card)
    card = codec.joined(message)
    worker = Worker(card=card, address=message.address, seen_s=loop.clock())
    loop.post_now(card, worker)
    return worker


async def submit(loop: SchedulerLoop, request_id: str, proxy: Proxy, prompt: int = 100) -> None:
    wanted = spec(request_id, prompt)
    request = codec.request(wanted, proxy_id=proxy.key, now_s=loop.clock())
    await loop.post(Submitted(request=request), wanted.SerializeToString())


def kinds(commands) -> list[str]:
    return [codec.command_kind(command) for command in commands]


def said(updates) -> list[str]:
    return [update_kind(update) for update in updates]


async def test_a_pause_of_the_scheduler_itself_ends_no_lease():
    clock = Hand()
    async with running(clock, ticking=True) as (loop, _):
        worker = join(loop, "p0")
        await asyncio.sleep(0.05)
        clock.now_s += 30  # stopped and continued, or the machine slept
        await asyncio.sleep(0.05)
        assert not worker.outbox.closed and "p0" in loop.workers
        for _ in range(80):  # it runs again, and the worker stays silent
            clock.now_s += 0.05
            await asyncio.sleep(0.03)
            if worker.outbox.closed:
                break
        assert worker.outbox.failure.startswith("silent for")
        await asyncio.sleep(0.05)
        assert not loop.workers and not loop.machine.cluster.instances


@pytest.mark.parametrize("silent", [False, True])
async def test_an_instance_that_comes_back_has_not_died_unless_it_was_silent(silent):
    clock = Hand()
    async with running(clock, ticking=True) as (loop, _):
        lost = join(loop, "p0")
        others = [join(loop, name) for name in ("p1", "d0", "d1")]
        await submit(loop, "a", Proxy(key="x#1"))
        await eventually(lambda: "a" in loop.machine.requests)
        if not silent:
            loop.post_now(lost.left(), lost)

        def is_lost() -> bool:
            clock.now_s += 0.02
            for one in others:
                one.seen_s = clock.now_s
            return "p0" not in loop.workers

        await eventually(is_lost)
        join(loop, "p0")
        await eventually(lambda: "p0" in loop.workers)
        request = loop.machine.requests["a"]
        assert (request.attempts, len(request.suspicion.all)) == (1, silent)


async def test_metrics_follow_the_machine():
    clock = Hand()
    async with running(clock) as (loop, registry):
        proxy = Proxy(key="x#1")
        loop.post_now(None, proxy)
        workers = [join(loop, "p0"), join(loop, "d0")]
        for name in ("a", "b", "c"):
            await submit(loop, name, proxy)
        await submit(loop, "huge", proxy, 5000)
        loop.post_now(ProxyLeft(proxy_id="x#1"))
        await asyncio.sleep(0.01)
        text = registry.render()[0].decode()
        for line in (
            'millrace_scheduler_fleet_instances{role="prefill"} 1.0',
            'millrace_scheduler_fleet_instances{role="decode"} 1.0',
            'millrace_scheduler_fleet_instances{role="kvp"} 0.0',
            "millrace_scheduler_spread_requests 0.0",
            'millrace_scheduler_ended_requests_total{state="cancelled"} 3.0',
            'millrace_scheduler_refused_requests_total{code="too_large"} 1.0',
            'millrace_scheduler_sent_messages_total{kind="admit_decode"} 3.0',
            'millrace_scheduler_sent_messages_total{kind="run_prefill"} 2.0',
            "millrace_scheduler_queued_requests 0.0",
            "millrace_scheduler_live_requests 0.0",
            "millrace_scheduler_step_seconds_count 7.0",
        ):
            assert line in text, text
        assert kinds(await workers[0].outbox.take()) == [
            *("registered", "run_prefill", "run_prefill"),
            *("cancel", "cancel"),
        ]
        assert said(await proxy.outbox.take())[-4:] == ["placed"] * 3 + ["refused"]


async def test_every_effect_has_its_handler():
    async with running(Hand()) as (loop, _):
        assert set(loop.out.handlers) == set(typing.get_args(effects.Effect))


async def test_a_retried_request_goes_before_what_its_new_instance_holds():
    async with running(Hand(), **IN_ORDER) as (loop, registry):
        lost, left = join(loop, "p0"), join(loop, "p1")
        join(loop, "d0"), join(loop, "d1")
        for name in ("a", "b", "c", "d"):  # p1 gets b and d
            await submit(loop, name, Proxy(key="x#1"))
        loop.post_now(InstanceLeft(instance_id="p0", generation=lost.card.generation), lost)
        await asyncio.sleep(0.01)
        commands = await left.outbox.take()
        assert kinds(commands) == ["registered", *["run_prefill"] * 3, "order"]
        assert RequestSpec.FromString(commands[-2].request).request_id == "a"
        order = [entry[0].request_id for entry in commands[-1].queue]
        assert order == ["b", "a", "d"]
        text = registry.render()[0].decode()
        assert 'millrace_scheduler_sent_messages_total{kind="order"} 1.0' in text


async def test_a_double_keeps_the_first_spec():
    async with running(Hand()) as (loop, _):
        proxy = Proxy(key="x#1")
        loop.post_now(None, proxy)
        prefill, _ = join(loop, "p0"), join(loop, "d0")
        await submit(loop, "a", proxy, 100)
        await asyncio.sleep(0.01)
        await submit(loop, "a", proxy, 50)
        await asyncio.sleep(0.01)
        updates = [u for u in await proxy.outbox.take() if not isinstance(u, Fleet)]
        assert said(updates) == ["placed"]
        loop.post_now(ProxyLeft(proxy_id="x#1"))
        await eventually(lambda: not loop.machine.requests)
        (run,) = [c for c in await prefill.outbox.take() if isinstance(c, SendRunPrefill)]
        assert RequestSpec.FromString(run.request).prompt_tokens == 100


async def heard(proxy: Proxy) -> list[object]:
    return [update for update in await proxy.outbox.take() if not isinstance(update, Fleet)]


async def test_an_id_that_another_proxy_holds_is_refused_until_it_is_free():
    async with running(Hand()) as (loop, _):
        first, second = Proxy(key="x#1"), Proxy(key="y#1")
        for proxy in (first, second):
            loop.post_now(None, proxy)
        prefills = [join(loop, "p0"), join(loop, "p1")]
        _ = join(loop, "d0"), join(loop, "d1")
        await submit(loop, "a", first, 100)
        await submit(loop, "a", second, 50)
        await eventually(lambda: loop.machine.requests)
        assert said(await heard(first)) == ["placed"]
        (refused,) = await heard(second)
        assert (refused.request_id, refused.code, refused.retry_after_s) == ("a", "overloaded", 1.0)
        assert "x#1" in refused.message
        loop.post_now(ProxyLeft(proxy_id="x#1"))
        await submit(loop, "a", second, 50)
        await eventually(lambda: loop.machine.holder("a") == "y#1")
        assert said(await heard(second)) == ["placed"]
        sent = [command for prefill in prefills for command in await prefill.outbox.take()]
        runs = [command.request for command in sent if isinstance(command, SendRunPrefill)]
        assert [RequestSpec.FromString(run).prompt_tokens for run in runs] == [100, 50]


@pytest.mark.parametrize("reopens_first", [True, False])
async def test_in_a_takeover_the_request_that_was_there_before_counts(reopens_first):
    estate = Estate(workers=["p0", "d0"], proxies=["x", "y"], is_inherited=True)
    async with running(Hand(), estate=estate) as (loop, _):
        former, other = Proxy(key="x#1"), Proxy(key="y#1")
        for proxy in (former, other):
            loop.post_now(None, proxy)
        prefill, _ = join(loop, "p0"), join(loop, "d0")
        wanted = spec("a", 100)
        request = codec.request(wanted, proxy_id="x#1", now_s=loop.clock())
        reopened = (Reopened(request=request), wanted.SerializeToString())
        if reopens_first:
            await loop.post(*reopened)
        await submit(loop, "a", other, 50)
        if not reopens_first:
            await loop.post(*reopened)
        loop.post_now(TakeoverEnded())
        await eventually(lambda: loop.machine.requests)
        assert said(await heard(other)) == ["refused"]
        assert said(await heard(former)) == ["placed"]
        (run,) = [c for c in await prefill.outbox.take() if isinstance(c, SendRunPrefill)]
        assert RequestSpec.FromString(run.request).prompt_tokens == 100


async def test_a_change_of_policy_waits_its_turn_and_shows_in_the_metrics():
    async with running(Hand()) as (loop, registry):
        text = registry.render()[0].decode()
        info = 'policy_info{planner="auto",policy="%s",preemption="operator"}'
        assert f"{info % 'millrace'} 1.0" in text
        prefill = join(loop, "p0")
        join(loop, "d0")
        await submit(loop, "a", Proxy(key="x#1"))
        changed = [PolicyChanged(policy=name) for name in ("edf", "lars", "lars", "edf")]
        before = await asyncio.gather(*(loop.set_policy(event) for event in changed))
        assert before == ["millrace", "edf", "lars", "lars"] and loop.machine.policy == "edf"
        assert kinds(await prefill.outbox.take()) == ["registered", "run_prefill"]
        text = registry.render()[0].decode()
        assert f"{info % 'edf'} 1.0" in text and info % "lars" not in text
        assert 'millrace_scheduler_policy_changes_total{policy="edf"} 2.0' in text
        assert 'millrace_scheduler_policy_changes_total{policy="lars"} 1.0' in text


async def test_instances_that_order_their_own_work_hear_of_the_policy():
    async with running(Hand(), policy="fcfs") as (loop, _):
        mixed, decode = join(loop, "m0", role="mixed"), join(loop, "d0")
        for name in ("edf", "edf", "lars"):
            await loop.set_policy(PolicyChanged(policy=name))
        late = join(loop, "m1", role="mixed")
        first, *changes = await mixed.outbox.take()
        assert first.policy == "fcfs"
        assert [change.name for change in changes] == ["edf", "lars"]
        assert kinds(await decode.outbox.take()) == ["registered"]
        assert [m.policy for m in await late.outbox.take()] == ["lars"]


async def test_who_asked_for_a_policy_may_leave_before_it_changes():
    async with running(Hand()) as (loop, _):
        asking = asyncio.create_task(loop.set_policy(PolicyChanged(policy="edf")))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.sleep(0.01)
        assert asking.cancelled() and loop.machine.policy == "edf"


async def test_attainment_by_class_and_predictions_show_in_the_metrics():
    clock = Hand()
    async with running(clock) as (loop, registry):
        proxy = Proxy(key="x#1")
        join(loop, "p0"), join(loop, "d0")
        for name, slo_class, ttft_s in (
            ("a", "chat", 1.0),
            ("b", "chat", 0.3),
            ("c", "batch", 9.0),
        ):
            wanted = spec(name, 100)
            wanted.slo.class_name, wanted.slo.ttft_s = slo_class, ttft_s
            request = codec.request(wanted, proxy_id=proxy.key, now_s=loop.clock())
            await loop.post(Submitted(request=request), wanted.SerializeToString())
        await submit(loop, "huge", proxy, 5000)
        await asyncio.sleep(0.01)
        clock.now_s += 0.5
        for name in ("a", "b"):
            await loop.post(reported("d0", DecodeStarted(request_id=name)))
        failed = RequestFailed(request_id="c", message="no luck", retryable=False)
        await loop.post(reported("d0", failed))
        await asyncio.sleep(0.01)
        text = registry.render()[0].decode()
        for line in (
            'millrace_scheduler_slo_requests_total{met="true",slo_class="chat"} 1.0',
            'millrace_scheduler_slo_requests_total{met="false",slo_class="chat"} 1.0',
            'millrace_scheduler_slo_requests_total{met="false",slo_class="batch"} 1.0',
            # predicted 0.1 s each, because b precedes a; both took 0.5 s
            'millrace_scheduler_predicted_ttft_ratio_count{prompt="1k"} 2.0',
            'millrace_scheduler_predicted_ttft_ratio_bucket{le="0.2",prompt="1k"} 2.0',
            'millrace_scheduler_predicted_ttft_ratio_bucket{le="0.1",prompt="1k"} 0.0',
        ):
            assert line in text, text


async def test_the_signals_of_pools_are_gauges_where_they_were_measured():
    clock = Hand()
    async with running(clock) as (loop, registry):
        proxy = Proxy(key="x#1", parked_requests=3)
        loop.post_now(None, proxy)
        join(loop, "p0"), join(loop, "d0")
        await submit(loop, "a", proxy)
        await asyncio.sleep(0.01)
        assert await loop.set_cordon("p0", cordoned=True)
        clock.now_s += 5.0
        text = registry.render()[0].decode()
        for line in (
            'pool_draining_instances{role="prefill"} 1.0',
            'pool_active_requests{role="decode"} 1.0',
            'pool_backlog_seconds{role="prefill"} 0.1',
            'pool_arriving_instances{role="prefill"} 0.02',
            'pool_kv_utilisation_ratio{role="decode"} 0.08',
            "parked_requests 3.0",
        ):
            assert f"\nmillrace_scheduler_{line}\n" in text, text
        for absent in ("pool_ttft_slo_ratio{", 'pool_kv_utilisation_ratio{role="prefill"}'):
            assert absent not in text


async def test_a_cordon_waits_its_turn():
    """The instance may be gone before the cordon. Its next incarnation is not cordoned."""
    async with running(Hand()) as (loop, _):
        worker = join(loop, "d0")
        await asyncio.sleep(0.01)
        assert await loop.set_cordon("d0", cordoned=True)
        gone = InstanceLeft(instance_id="d0", generation=worker.card.generation)
        loop.post_now(gone, worker)
        assert not await loop.set_cordon("d0", cordoned=True)
        assert not await loop.evict("d0", abort=True)
        join(loop, "d0")
        await asyncio.sleep(0.01)
        assert not loop.machine.cluster.instances["d0"].draining


async def test_an_instance_that_leaves_as_it_is_evicted_is_not_told():
    """The instance may end, and return, between the cordon and the eviction."""
    for comes_back in (False, True):
        async with running(Hand()) as (loop, _):
            worker = join(loop, "d0")
            await asyncio.sleep(0)
            evicting = asyncio.create_task(loop.evict("d0", abort=False))
            await asyncio.sleep(0)  # the cordon is queued
            left = InstanceLeft(instance_id="d0", generation=worker.card.generation)
            loop.post_now(left, worker)
            successor = join(loop, "d0") if comes_back else None
            assert not await evicting
            if successor is not None:
                assert kinds(await successor.outbox.take()) == ["registered"]


async def test_a_leader_that_dies_while_it_takes_over_leaves_what_it_inherited():
    estate = Estate(workers=["d0", "p0"], proxies=["x"], cordoned=["p0"], is_inherited=True)
    async with running(Hand(), estate=estate) as (loop, _):
        join(loop, "p1")
        await eventually(lambda: "p1" in loop.workers)
        left = Estate.decode(loop.note(), "")
        assert (left.workers, left.proxies) == (["d0", "p0", "p1"], ["x"])
        assert left.cordoned == ["p0"]
