"""Mixed instances: they are placed at like decode instances and prefill what they are given."""

from __future__ import annotations

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.effects import AdmitDecode, CancelOn, Order, Place, Record, Refuse, RunPrefill
from millrace.core.request import RequestState
from support.core_events import Bench, groups_of, instance, of


def states(found):
    return [effect.state.value for effect in of(Record, found)]


def test_a_request_goes_whole_to_the_mixed_instance_it_is_placed_at():
    bench = Bench(instance("m0"))
    found = bench.submit("a", 100)
    assert [type(e) for e in found] == [Place, AdmitDecode, Record, RunPrefill, Record]
    (run,) = of(RunPrefill, found)
    assert run.instance_id == run.decode_id == "m0"
    assert [(c.start_token, c.num_tokens, c.instance_ids) for c in run.chunks] == [
        (0, 100, ("m0",))
    ]


def test_a_mixed_instance_packs_its_own_work_so_nothing_is_ordered_or_held_back():
    config = SchedulerConfig(policy="edf", preemption="operator", tasks_ahead=1)
    bench = Bench(instance("m0", pages=1000), config=config)
    for at, name in enumerate("abcd"):
        found = bench.submit(name, ttft_s=9.0 - at)
        assert [e.request_id for e in of(RunPrefill, found)] == [name]
    assert not of(Order, bench.all) and bench.machine.queued == 0


def test_a_whole_life_at_a_mixed_instance():
    bench = Bench(instance("m0"))
    bench.submit("a")
    bench.chunk_started("m0", "a")
    bench.suspended("m0", "a", 0.01)
    assert bench.machine.requests["a"].state is RequestState.PREFILLING
    bench.computed("m0", "a")
    assert bench.machine.requests["a"].state is RequestState.TRANSFERRING
    bench.decoding("m0", "a")
    bench.finished("m0", "a")
    assert states(bench.all) == ["queued", "prefilling", "transferring", "decoding", "finished"]
    assert not bench.machine.requests and bench.machine.ignored == 0
    assert bench.machine.cluster.instances["m0"].virtual_pages == 0


def test_whole_lives_are_booked_even_where_answers_grow():
    config = SchedulerConfig(decode_reserve="grow", decode_headroom_tokens=16)
    booked = []
    for setting in (SchedulerConfig(), config):
        bench = Bench(instance("m0"), config=setting)
        bench.submit("a", 100, 500)
        booked.append(bench.machine.cluster.instances["m0"].virtual_pages)
    assert booked[0] == booked[1] > 100 / 16


def test_requests_are_spread_by_freeness():
    bench = Bench(instance("m0"), instance("m1"))
    placed = [of(Place, bench.submit(name))[0].decode_id for name in "abcd"]
    assert placed == ["m0", "m1", "m0", "m1"]


@pytest.mark.parametrize("computed", [False, True])
def test_a_dead_mixed_instance_prefills_elsewhere_only_before_the_first_token(computed):
    bench = Bench(instance("m0"), instance("m1"))
    bench.submit("a")
    if computed:
        bench.computed("m0", "a")
    found = bench.died("m0")
    assert states(found) == (["failed"] if computed else ["queued", "queued", "prefilling"])
    assert [e.instance_id for e in of(RunPrefill, found)] == ([] if computed else ["m1"])


def test_a_cancel_is_told_to_it_once():
    bench = Bench(instance("m0"))
    bench.submit("a")
    assert [e.instance_id for e in of(CancelOn, bench.cancel("a"))] == ["m0"]


def test_plain_decode_beside_mixed_ones_gets_nothing_while_nobody_prefills_for_it():
    bench = Bench(instance("m0"), instance("d0", pages=1000))  # d0 is the freer one
    found = bench.submit("a")
    assert [e.instance_id for e in of(RunPrefill, found)] == ["m0"]
    (admitted,) = of(AdmitDecode, bench.submit("large", 1700, 10))  # d0 alone could hold it
    assert [shard.worker_id for shard in admitted.shards] == ["m0", "d0"]
    config = SchedulerConfig(max_kvp_degree=1)
    bench = Bench(instance("m0"), instance("d0", pages=1000), config=config)
    assert [e.code for e in of(Refuse, bench.submit("large", 1700, 10))] == ["too_large"]
    bench.step(instance("p0"))
    assert [e.instance_id for e in of(RunPrefill, bench.submit("b"))] == ["p0"]


def test_whoever_waits_for_prefill_instances_that_die_moves_on_to_a_mixed_one():
    config = SchedulerConfig(tasks_ahead=1)
    bench = Bench(instance("p0"), instance("d0", pages=1000), instance("m0"), config=config)
    bench.submit("a")
    bench.submit("b")
    assert [e.instance_id for e in of(RunPrefill, bench.all)] == ["p0"]
    found = bench.died("p0")
    moved = {e.request_id: e.instance_id for e in of(RunPrefill, found)}
    assert moved["b"] == "m0" and bench.machine.queued == 0


def test_what_a_mixed_instance_takes_is_predicted_by_its_own_degrees():
    config = SchedulerConfig(planner="cdsp")
    fast = groups_of(1, 2)
    bench = Bench(
        instance("p0", latency=fast),
        instance("p1", latency=fast),
        instance("m0"),
        instance("d0"),
        config=config,
    )
    bench.submit("before", 100)  # predicted by groups of two
    bench.cancel("before")
    bench.died("p0")
    bench.died("p1")
    found = bench.submit("a", 100)
    assert of(Place, found)[0].predicted_ttft_s == pytest.approx(0.1)
