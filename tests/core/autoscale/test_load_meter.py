"""The signals of a fleet's load, measured in its scheduler."""

from __future__ import annotations

import subprocess
import sys

import pytest

from millrace.core.autoscale.load import FleetLoad, PoolLoad
from millrace.core.autoscale.load_meter import LEAST_SPAN_S, WINDOW_S, LoadMeter
from millrace.core.config import SchedulerConfig
from millrace.core.scheduler import events, reports
from millrace.core.scheduler.effects import Effect
from support.core_events import Bench, groups_of, instance


class Metered(Bench):
    """A bench whose steps a meter gets. A token of prompt is a millisecond of prefill."""

    def __init__(self, *fleet: events.InstanceJoined, config: SchedulerConfig | None = None):
        self.meter: LoadMeter | None = None
        super().__init__(*fleet, config=config)
        self.meter = LoadMeter(self.machine, self.now_s)

    def step(self, event: events.Event) -> list[Effect]:
        found = super().step(event)
        if self.meter is not None:
            self.meter.saw(event, found, self.now_s)
        return found

    def load(self, role: str = "prefill") -> PoolLoad:
        assert self.meter is not None
        return self.meter.load(self.now_s).of(role)

    def beat(self, instance_id: str, tbt_s: float) -> None:
        self.step(
            events.Reported(
                instance_id=instance_id,
                generation=1,
                report=reports.Heartbeat(free_pages=1, running=1, waiting=0, tbt_s=tbt_s),
            )
        )

    def first_token(self, request_id: str, prefill: str = "p0") -> None:
        self.chunk_started(prefill, request_id)
        self.computed(prefill, request_id)


def metered(*names: str, pages: int = 100, **config: object) -> Metered:
    return Metered(
        *(instance(name, pages=pages) for name in names or ("p0", "d0")),
        config=SchedulerConfig(policy="fcfs", preemption="none", **config),
    )


# ---- the pools


def test_a_pool_counts_who_takes_work_and_who_does_not():
    b = metered("p0", "p1", "p2", "d0")
    b.cordon("p0")
    b.drains("p1")
    assert (b.load().ready, b.load().draining) == (1, 2)
    assert (b.load("decode").ready, b.load("decode").draining) == (1, 0)


def test_signals_are_those_of_the_role():
    b = metered()
    b.submit("a")
    prefill, decode, kvp = (b.load(role) for role in ("prefill", "decode", "kvp"))
    assert (prefill.kv_utilisation, prefill.tbt_slo_ratio) == (None, None)
    assert (decode.backlog_s, decode.arriving, decode.ttft_slo_ratio) == (None, None, None)
    assert kvp == PoolLoad(role="kvp")
    assert b.load("mixed") == PoolLoad(role="mixed")


def test_requests_are_active_where_they_are_and_will_be():
    b = metered()
    b.submit("a")
    b.submit("b")
    assert [b.load(role).active_requests for role in ("prefill", "decode")] == [2, 2]
    b.first_token("a")
    assert b.load().active_requests == 2  # its cache is on its way
    b.decoding("d0", "a")
    assert [b.load(role).active_requests for role in ("prefill", "decode")] == [1, 2]
    b.finished("d0", "a")
    assert [b.load(role).active_requests for role in ("prefill", "decode")] == [1, 1]


def test_parked_requests_are_passed_on():
    assert metered().meter.load(0.0, parked_requests=3).parked_requests == 3
    assert FleetLoad(pools={}).of("decode") == PoolLoad(role="decode")


def test_a_sample_for_the_autoscaler_has_every_signal():
    load = PoolLoad(role="mixed", ready=2, draining=1, active_requests=5, backlog_s=1.0)
    sample = load.metrics(sampled_s=9.0, parked_requests=4, size=5, quota=7)
    assert (sample.sampled_s, sample.ready, sample.starting, sample.draining) == (9.0, 2, 3, 1)
    assert (sample.active_requests, sample.parked_requests, sample.quota) == (5, 4, 7)
    assert (sample.backlog_s, sample.arriving, sample.kv_utilisation) == (1.0, None, None)
    surplus = load.metrics(sampled_s=9.0, parked_requests=0, size=1)
    assert (surplus.ready, surplus.starting, surplus.capacity) == (1, 0, 1)


# ---- prefill's work


def test_the_backlog_is_what_waits_and_what_is_left_of_what_runs():
    b = metered(pages=1000, tasks_ahead=1)
    for name, tokens in (("a", 1000), ("b", 500), ("c", 200)):
        b.submit(name, tokens)
    assert b.load().backlog_s == pytest.approx(1.7)
    b.chunk_started("p0", "a")
    b.now_s += 0.4
    assert b.load().backlog_s == pytest.approx(1.3)
    b.computed("p0", "a")
    assert b.load().backlog_s == pytest.approx(0.7)
    b.cancel("c")
    assert b.load().backlog_s == pytest.approx(0.5)


def test_a_draining_instances_work_is_backlog_too():
    b = metered("p0", "p1", "d0")
    b.submit("a", 1000)
    b.cordon("p0")
    assert b.load().backlog_s == pytest.approx(1.0)


def test_work_is_in_seconds_of_one_instance():
    """A group of two takes half the time, and both of its members."""
    fleet = [instance(name, latency=groups_of(1, 2)) for name in ("p0", "p1")]
    config = SchedulerConfig(policy="fcfs", planner="esp", tasks_ahead=1)
    b = Metered(*fleet, instance("d0", pages=1000), config=config)
    b.submit("a", 1000)
    b.submit("b", 1000)
    assert [len(r.chunks) for r in b.machine.requests.values()] == [1, 0]
    assert b.machine.requests["b"].predicted_prefill_s == pytest.approx(0.5)
    assert b.load().backlog_s == pytest.approx(2.0)
    assert b.load().arriving == pytest.approx(2.0 / LEAST_SPAN_S)


def test_arriving_is_the_work_of_the_window_over_its_seconds():
    b = metered(pages=1000)
    b.submit("a", 1000)
    assert b.load().arriving == pytest.approx(1.0 / LEAST_SPAN_S)  # no rate from one moment
    b.now_s = 10.0
    b.submit("b", 2000)
    assert b.load().arriving == pytest.approx(3.0 / 10.0)
    b.now_s = WINDOW_S + 1.0
    assert b.load().arriving == pytest.approx(2.0 / WINDOW_S)
    b.now_s = WINDOW_S + 11.0
    assert b.load().arriving == 0.0


def test_arriving_does_not_fall_when_work_is_done_or_cancelled():
    b = metered()
    b.submit("a", 1000)
    b.submit("b", 1000)
    b.serve("a")
    b.cancel("b")
    assert b.load().arriving == pytest.approx(2.0 / LEAST_SPAN_S)


def test_what_is_refused_as_too_much_arrives_all_the_same():
    b = metered(max_queue_requests=1, tasks_ahead=1)
    for number in range(4):
        b.submit(f"r{number}", 1000)
    assert len(b.machine.requests) == 2
    assert b.load().arriving == pytest.approx(4.0 / LEAST_SPAN_S)


def test_what_fits_nowhere_is_no_load_and_a_double_is_none_either():
    b = metered()
    b.submit("huge", 4000)  # of 100 pages with 16 tokens
    assert b.load().arriving == 0.0
    b.submit("a", 1000)
    b.submit("a", 1000)
    assert b.load().arriving == pytest.approx(1.0 / LEAST_SPAN_S)


# ---- TTFT


def test_ttft_is_a_mean_over_the_window():
    b = metered("p0", "p1", "d0")
    b.submit("a", 100, ttft_s=1.0)
    b.submit("b", 100, ttft_s=4.0)
    assert b.load().ttft_slo_ratio is None
    b.now_s = 0.5
    b.first_token("a")
    assert b.load().ttft_slo_ratio == pytest.approx(0.5)
    b.now_s = 1.2
    b.first_token("b", "p1")
    assert b.load().ttft_slo_ratio == pytest.approx((0.5 + 0.3) / 2)
    b.now_s = 0.5 + WINDOW_S + 0.1
    assert b.load().ttft_slo_ratio == pytest.approx(0.3)
    b.now_s = 1.2 + WINDOW_S + 0.1
    assert b.load().ttft_slo_ratio is None


def test_the_worst_class_counts():
    b = metered("p0", "p1", "d0")
    b.submit("a", 100, ttft_s=1.0, slo_class="batch")
    b.submit("b", 100, ttft_s=1.0, slo_class="chat")
    b.now_s = 0.2
    b.first_token("a")
    b.now_s = 0.9
    b.first_token("b", "p1")
    assert b.load().ttft_slo_ratio == pytest.approx(0.9)


def test_a_pool_that_stands_still_does_not_look_calm():
    b = metered()
    b.submit("a", 100, ttft_s=1.0)
    b.now_s = 1.0
    assert b.load().ttft_slo_ratio is None
    b.now_s = 6.0
    assert b.load().ttft_slo_ratio == pytest.approx(6.0)
    b.first_token("a")
    assert b.load().ttft_slo_ratio == pytest.approx(6.0)
    b.decoding("d0", "a")
    b.finished("d0", "a")
    assert b.load().ttft_slo_ratio == pytest.approx(6.0)  # once


@pytest.mark.parametrize("at_s, ratio", [(0.9, None), (3.0, 3.0)])
@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_who_ends_without_a_token_counts_if_it_was_late(at_s, ratio, end):
    b = metered()
    b.submit("a", 100, ttft_s=1.0)
    b.now_s = at_s
    if end == "cancelled":
        b.cancel("a")
    else:
        b.failed("p0", "a", retryable=False)
    assert b.load().ttft_slo_ratio == (None if ratio is None else pytest.approx(ratio))


def test_nothing_is_kept_of_requests_that_are_over():
    b = metered(max_queue_requests=2, tasks_ahead=1)
    for number in range(5):  # one runs, two wait for decode's pages, two are refused
        b.submit(f"r{number}", 900, new=60, ttft_s=1.0, tbt_s=0.1)
    assert sorted(b.machine.requests) == ["r0", "r1", "r2"]
    b.now_s = 5.0
    b.cancel("r1")  # no KV owner had room: prefill is not late with this request
    b.failed("p0", "r0", retryable=False)
    assert b.load().ttft_slo_ratio == pytest.approx(5.0)
    b.cancel("r2")
    b.now_s += WINDOW_S + 1.0
    assert b.load().ttft_slo_ratio is None  # a waiting request counts as ever later


def test_an_objective_that_prefill_alone_misses_counts_for_nobody():
    b = metered("p0", "p1", "d0")
    b.submit("a", 1000, ttft_s=0.9)
    b.submit("b", 1000)
    b.now_s = 5.0
    assert b.load().ttft_slo_ratio is None
    b.first_token("a")
    assert b.load().ttft_slo_ratio is None


def test_a_prefill_that_is_done_again_is_as_late_as_its_first_try_made_it():
    b = metered("p0", "d0", "d1")
    b.submit("a", 100, ttft_s=1.0)
    b.now_s = 3.0
    b.died("p0")
    b.step(instance("p1"))
    b.released("d0", "a")
    b.now_s = 4.0
    b.first_token("a", "p1")
    assert b.load().ttft_slo_ratio == pytest.approx(4.0)


# ---- decode


def test_kv_in_use_is_what_requests_hold_or_are_to_hold():
    b = metered()
    b.submit("a", 100)  # 128 tokens: 8 pages of 100
    assert b.load("decode").kv_utilisation == pytest.approx(0.08)
    b.first_token("a")
    b.decoding("d0", "a")
    b.submit("b", 100)
    assert b.load("decode").kv_utilisation == pytest.approx(0.16)
    b.step(instance("d1", pages=300))
    assert b.load("decode").kv_utilisation == pytest.approx(0.04)
    b.cordon("d0")
    assert (
        b.load("decode").kv_utilisation == 0.0
    )  # what draining instances hold is no load of the others
    b.cordon("d1")
    assert b.load("decode").kv_utilisation is None


def test_who_waits_for_pages_is_decodes_load_and_not_prefills():
    b = metered()
    for number in range(4):
        b.submit(f"r{number}", 900, new=60, ttft_s=1.0)  # 60 pages: one instance has room
    assert b.load("decode").kv_utilisation == pytest.approx(2.4)
    assert b.load().backlog_s == pytest.approx(0.9)
    b.now_s = 5.0
    assert b.load().ttft_slo_ratio == pytest.approx(5.0)
    b.first_token("r0")
    b.released("p0", "r0")
    b.decoding("d0", "r0")
    b.finished("d0", "r0")
    b.now_s = 5.5
    b.first_token("r1")
    assert b.load().ttft_slo_ratio == pytest.approx((5.0 + 0.5) / 2)


def test_with_nobody_to_prefill_all_that_waits_waits_for_prefill():
    b = metered("p0", "d0", "d1")
    b.submit("a", 1000)
    b.died("p0")
    assert b.machine.requests["a"].decode_id is None
    assert (b.load().ready, b.load().backlog_s) == (0, pytest.approx(1.0))


def test_tbt_is_over_the_whole_answer():
    b = metered()
    b.submit("a", 100, tbt_s=0.1)
    b.now_s = 1.0
    b.first_token("a")
    b.now_s = 1.5
    b.decoding("d0", "a")
    assert b.load("decode").tbt_slo_ratio is None  # no heartbeat has reported it
    b.now_s = 3.0
    b.finished("d0", "a", tokens=41)
    assert b.load("decode").tbt_slo_ratio == pytest.approx(2.0 / 40 / 0.1)
    b.now_s = 3.0 + WINDOW_S + 0.1
    assert b.load("decode").tbt_slo_ratio is None


def test_tbt_of_several_choices_is_that_of_each():
    b = metered()
    b.submit("a", 100, choices=2, tbt_s=0.1)
    b.first_token("a")
    b.decoding("d0", "a")
    b.now_s = 2.0
    b.finished("d0", "a", tokens=82)
    assert b.load("decode").tbt_slo_ratio == pytest.approx(2.0 / 40 / 0.1)


@pytest.mark.parametrize("tokens, reason", [(1, "stop"), (0, "stop"), (41, "cancelled")])
def test_an_answer_without_a_second_token_has_no_tbt(tokens, reason):
    b = metered()
    b.submit("a", 100, tbt_s=0.1)
    b.first_token("a")
    b.decoding("d0", "a")
    b.now_s = 2.0
    if reason == "cancelled":
        b.cancel("a", "stop")
    else:
        b.finished("d0", "a", tokens=tokens)
    assert b.load("decode").tbt_slo_ratio is None


def test_long_answers_count_while_they_run():
    b = metered("p0", "p1", "d0", "d1")
    for name, prefill, owner, tbt_s in (("a", "p0", "d0", 0.1), ("b", "p1", "d1", 0.2)):
        b.submit(name, 100, tbt_s=tbt_s)
        b.first_token(name, prefill)
        b.decoding(owner, name)
    b.beat("d0", 0.05)
    assert b.load("decode").tbt_slo_ratio == pytest.approx(0.5)
    b.beat("d1", 0.3)
    assert b.load("decode").tbt_slo_ratio == pytest.approx((0.5 + 1.5) / 2)
    b.beat("d1", 0.0)  # between two tokens the heartbeat reports nothing new
    assert b.load("decode").tbt_slo_ratio == pytest.approx((0.5 + 1.5) / 2)
    b.now_s = 100.0
    assert b.load("decode").tbt_slo_ratio == pytest.approx((0.5 + 1.5) / 2)
    b.cancel("b")
    assert b.load("decode").tbt_slo_ratio == pytest.approx(0.5)


def test_what_does_not_decode_yet_has_no_tbt():
    b = metered()
    b.beat("d0", 0.5)
    b.submit("a", 100, tbt_s=0.1)
    assert b.load("decode").tbt_slo_ratio is None
    b.first_token("a")
    assert b.load("decode").tbt_slo_ratio is None


# ---- mixed


def test_a_mixed_pool_has_the_signals_of_both():
    b = Metered(instance("m0"))
    b.submit("a", 1000, ttft_s=2.0, tbt_s=0.1)
    b.submit("b", 500)
    load = b.load("mixed")
    assert (load.ready, load.active_requests) == (1, 2)
    assert load.backlog_s == pytest.approx(1.5)
    assert load.arriving == pytest.approx(1.5 / LEAST_SPAN_S)
    assert load.kv_utilisation == pytest.approx((65 + 33) / 100)
    b.now_s = 1.0
    b.computed("m0", "a")
    b.decoding("m0", "a")
    b.beat("m0", 0.08)
    load = b.load("mixed")
    assert load.backlog_s == pytest.approx(0.5)
    assert load.ttft_slo_ratio == pytest.approx(0.5)
    assert load.tbt_slo_ratio == pytest.approx(0.8)


def test_a_mixed_pool_whose_instances_are_gone_is_told_of_what_waits():
    b = Metered(instance("m0"))
    b.submit("a", 1000)
    assert b.load("mixed").active_requests == 1
    b.step(events.InstanceLeft(instance_id="m0", generation=1))
    assert b.load("mixed").active_requests == 1
    assert b.load("mixed").backlog_s == pytest.approx(1.0)


# ---- kvp


def test_contexts_are_those_that_a_home_holds_but_a_part_of():
    b = metered(max_kv_tokens_per_worker=320)
    for name in ("k0", "k1", "k2"):
        b.step(instance(name))
    b.submit("short", 100)
    kvp = b.load("kvp")
    assert (kvp.ready, kvp.draining, kvp.contexts) == (3, 0, ())
    b.cancel("short")
    b.submit("a", 1000, new=120)
    owner = b.machine.cluster.instances["d0"]
    b.machine.requests["a"].land(300)

    def contexts():
        assert b.load("kvp").active_requests == 1
        (context,) = b.load("kvp").contexts
        return context

    context = contexts()
    assert (context.tokens, context.final_tokens, context.owner_tokens) == (300, 1120, 320)
    assert context.growth_tokens_s == pytest.approx(1000.0)  # a token a millisecond
    assert context.tokens_after(0.5) == 480
    request = b.machine.requests["a"]
    b.machine.step(
        events.Reported(
            instance_id="p0",
            generation=1,
            report=reports.ChunkFinished(request_id="a", chunk_index=0, compute_s=1, last=True),
        ),
        b.now_s,
    )
    assert request.first_token_s == 0.0
    b.now_s = 2.0
    assert (contexts().tokens, contexts().growth_tokens_s) == (1000, 0.0)  # no pace is known
    owner.tbt_s = 0.05
    assert (contexts().tokens, contexts().growth_tokens_s) == (1040, pytest.approx(20.0))
    b.now_s = 60.0
    assert contexts().tokens == 1120


def test_what_waits_for_workers_is_as_long_as_it_will_get():
    b = metered(max_kv_tokens_per_worker=320)
    b.step(instance("k0", pages=40))
    b.submit("a", 600, 40)
    b.submit("b", 601, 39)  # a has half of k0: the other half would do
    b.submit("c", 602, 38)  # no tokens left
    by_tokens = sorted((context.tokens, context.owner_tokens) for context in b.load("kvp").contexts)
    assert by_tokens == [(0, 320), (0, 320), (640, 320)]
    # Of c only the KV owner's share concerns the decode pool.
    assert b.load("decode").kv_utilisation == pytest.approx(3 * 320 / 1600)
    b.cordon("k0")
    assert (b.load("kvp").ready, b.load("kvp").draining) == (0, 1)


def test_what_decode_instances_hold_of_each_other_needs_no_kvp_worker():
    b = metered(max_kv_tokens_per_worker=320)
    b.step(instance("d1"))
    b.submit("a", 600, 40)
    assert b.machine.requests["a"].kv_instance_ids == ("d0", "d1")
    assert b.load("kvp").contexts == ()
    assert b.load("decode").kv_utilisation == pytest.approx(640 / 3200)


# ---- who may read it


@pytest.mark.parametrize(
    "module", ["millrace.core.autoscale.load", "millrace.wire.clients.scheduler_client"]
)
def test_who_sizes_pools_needs_neither_torch_nor_numpy(module):
    probe = f"import sys; sys.modules.update(torch=None, numpy=None); import {module}"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
