"""A request that does not fit for a moment is told to come later."""

from __future__ import annotations

from millrace.core.config import SchedulerConfig
from millrace.core.scheduler import effects, events, reports
from millrace.core.scheduler.fleet.absences import AWAY_S
from support.core_events import Bench, instance, of, reported, request

CONFIG = SchedulerConfig(max_kv_tokens_per_worker=320, lease_s=5.0)
D0, K0 = instance("d0", pages=20), instance("k0", pages=40)


def spread_bench() -> Bench:
    return Bench(instance("p0"), D0, K0, config=CONFIG)


def codes(found: list[effects.Effect]) -> list[str]:
    return [one.code for one in of(effects.Refuse, found)]


def left(bench: Bench, name: str) -> None:
    bench.step(events.InstanceLeft(instance_id=name, generation=1))


def test_what_fits_with_a_lost_instance_may_come_later() -> None:
    bench = spread_bench()
    left(bench, "k0")
    (refused,) = of(effects.Refuse, bench.step(request("a", 400)))
    assert refused.code == "unavailable" and refused.retry_after_s == CONFIG.lease_s
    assert refused.message.startswith("k0 may come back: 400 prompt tokens")
    assert codes(bench.step(request("b", 1000))) == ["too_large"]  # with k0, too
    assert codes(bench.step(request("c", 100))) == []
    bench.step(instance("k0", pages=40, generation=2))
    assert codes(bench.step(request("d", 400))) == []


def test_an_instance_is_not_expected_for_ever() -> None:
    bench = spread_bench()
    left(bench, "k0")
    bench.now_s += AWAY_S + 1.0
    assert codes(bench.step(request("a", 400))) == ["too_large"]


def test_who_said_that_it_leaves_is_not_expected() -> None:
    bench = spread_bench()
    bench.step(reported("k0", reports.Draining()))
    left(bench, "k0")
    assert codes(bench.step(request("a", 400))) == ["too_large"]


def test_the_former_leaders_instances_are_expected_as_long_as_lost_ones() -> None:
    bench = Bench(config=CONFIG)
    bench.step(events.TakeoverBegan())
    bench.step(instance("p0"))
    bench.step(D0)
    bench.step(events.TakeoverEnded(missing=("k0",)))
    assert codes(bench.step(request("a", 400))) == ["unavailable"]
    bench.now_s += AWAY_S - 1.0
    assert codes(bench.step(request("b", 400))) == ["unavailable"]
    bench.now_s += 2.0
    assert codes(bench.step(request("c", 400))) == ["too_large"]


def test_forgotten_instances_are_expected_as_long_as_lost_ones() -> None:
    bench = Bench(config=CONFIG)
    bench.step(events.InstancesForgotten())
    assert codes(bench.step(request("z", 400))) == ["unavailable"]  # nobody is there
    bench.step(instance("p0"))
    bench.step(D0)
    (refused,) = of(effects.Refuse, bench.step(request("a", 400)))
    assert refused.code == "unavailable" and refused.retry_after_s == CONFIG.lease_s
    assert refused.message.startswith("instances that the store has forgotten may come back: 400")
    assert codes(bench.step(request("b", 100))) == []
    bench.now_s += AWAY_S + 1.0
    assert codes(bench.step(request("c", 400))) == ["too_large"]


def test_an_earlier_attempt_of_its_own_makes_nothing_too_large() -> None:
    bench = spread_bench()
    bench.step(request("a", 400))
    bench.cancel("a", "its connection was lost")
    assert codes(bench.step(request("a", 400))) == []
