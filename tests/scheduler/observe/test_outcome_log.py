"""What a live scheduler writes for reports, and that nothing of it holds the scheduler up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

import pytest

from millrace.core.autoscale.load import FleetLoad, PoolLoad
from millrace.core.config import StoreConfig
from millrace.core.report.outcome import decode_outcome
from millrace.core.report.pool_sample import PoolSample, decode_sample
from millrace.core.scheduler import events
from millrace.core.scheduler.machine import Machine
from millrace.scheduler.observe.outcome_log import SAMPLE_S, OutcomeLog
from millrace.state.outcomes import RedisOutcomes
from support.live_stack import eventually
from support.recorded_runs import BEGAN_UNIX_S, CONFIG, steps
from support.scheduler_peers import quick, scheduler, spec
from support.stores import private_redis

LOAD = FleetLoad(pools={"prefill": PoolLoad(role="prefill", ready=2, arriving=1.0)})


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with private_redis() as found:
        yield found


async def test_outcomes_and_samples_have_unix_times(url: str) -> None:
    now, machine = [0.0], Machine(CONFIG)
    store = RedisOutcomes(StoreConfig(url=url), "")
    written = OutcomeLog(
        store,
        machine,
        lambda: LOAD,
        most=3,
        clock=lambda: now[0],
        unix=lambda: BEGAN_UNIX_S,
    )
    for now_s, event in steps():
        written.saw(event, machine.step(event, now_s), now_s)
    await written.write()
    found = [decode_outcome(one) async for one in store.outcomes()]
    assert [one.request_id for one in found] == ["quick", "late", "free"]  # the last three
    assert found[2].arrived_s == pytest.approx(BEGAN_UNIX_S + 3.0)
    assert [one async for one in store.samples()] == []
    now[0] = SAMPLE_S
    await written.write()
    [sample] = [decode_sample(one) async for one in store.samples()]
    assert sample.at_s == pytest.approx(BEGAN_UNIX_S + SAMPLE_S)
    assert sample.sample == PoolSample(
        role="prefill",
        instances=2,
        in_use=0.5,
        wanted=2,
        reason="load of 0.5 an instance, target 0.8",
    )
    await written.close()


async def test_a_store_out_of_reach_costs_rows_only(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(CONFIG)
    away = RedisOutcomes(StoreConfig(url="redis://127.0.0.1:1"), "")
    written = OutcomeLog(away, machine, lambda: LOAD, most=10)
    for now_s, event in steps():
        written.saw(event, machine.step(event, now_s), now_s)
    await written.close()
    assert "5 requests may be missing in reports" in caplog.text


async def test_an_error_of_the_observation_ends_it_alone(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> Iterable[object]:
        raise ValueError("broken")

    machine = Machine(CONFIG)
    store = RedisOutcomes(StoreConfig(url=url), "")
    written = OutcomeLog(store, machine, lambda: LOAD, most=10)
    monkeypatch.setattr("millrace.core.report.follower.OutcomeFollower.saw", broken)
    for _ in range(2):
        written.saw(events.Tick(), [], 0.0)
    assert caplog.text.count("reports end here: they can't follow Tick") == 1
    await written.close()


@pytest.mark.parametrize("most", [10, 0])
async def test_a_live_scheduler_writes_them(url: str, most: int) -> None:
    config = quick()
    config = replace(
        config,
        store=replace(config.store, url=url),
        telemetry=replace(config.telemetry, report_requests=most),
    )
    store = RedisOutcomes(config.store, config.scheduler.group)
    async with scheduler(config) as net:
        prefill, decode = await net.worker("p0"), await net.worker("d0")
        proxy = await net.proxy()
        await proxy.submit(spec("r", 100))
        await prefill.computed("r")
        await prefill.released("r")
        await decode.decoding("r")
        await decode.finished("r")

        async def ended() -> bool:
            return bool([one async for one in store.outcomes()])

        if most:
            await eventually(ended)
    found = [decode_outcome(one) async for one in store.outcomes()]
    assert [(one.request_id, one.state) for one in found] == [("r", "finished")][:most]
    await store.close()
