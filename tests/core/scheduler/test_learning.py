"""The scheduler's predictions follow the times that its instances take."""

from __future__ import annotations

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.scheduler.effects import Place, RunPrefill
from support.core_events import Bench, instance, of


def test_predictions_follow_an_instance_that_is_slower_than_its_model():
    bench = Bench(instance("p0"), instance("d0", pages=100_000))
    for number in range(40):
        bench.submit(f"r{number}", 100)
        bench.computed("p0", f"r{number}", compute_s=0.2)  # the model says 0.1 s
        bench.released("p0", f"r{number}")
    bench.submit("a", 1000)
    task = bench.machine.cluster.instances["p0"].queue[0]
    assert task.modelled_s == pytest.approx(1.0)
    assert task.predicted_s == pytest.approx(2.0, rel=0.15)  # no request had such a length yet
    found = bench.submit("b", 100)
    assert of(Place, found)[0].predicted_ttft_s == pytest.approx(0.2, rel=0.05)  # it goes first


def test_what_was_learned_of_an_instance_goes_with_it():
    bench = Bench(instance("p0"), instance("d0", pages=100_000))
    for number in range(40):
        bench.submit(f"r{number}", 100)
        bench.computed("p0", f"r{number}", compute_s=0.2)
        bench.released("p0", f"r{number}")
    bench.died("p0")
    bench.step(instance("p0", generation=2))
    bench.submit("a", 1000)
    assert bench.machine.cluster.instances["p0"].queue[0].predicted_s == pytest.approx(1.0)


def test_what_a_first_token_takes_beyond_computing_is_learned_of_those_that_wait_for_nobody():
    """0.1 s of compute, decode's report 0.035 s after it, 0.005 s after the token itself."""
    bench = Bench(instance("p0"), instance("d0", pages=100_000))
    for number in range(5):
        bench.submit(f"r{number}", 100)
        bench.now_s += 0.11
        bench.computed("p0", f"r{number}", compute_s=0.1)
        bench.now_s += 0.025
        bench.decoding("d0", f"r{number}", since_token_s=0.005)
        bench.released("p0", f"r{number}")
    found = bench.submit("a", 100)
    assert of(Place, found)[0].predicted_ttft_s == pytest.approx(0.13)
    found = bench.submit("b", 100)  # it waits for a
    bench.now_s += 5.0
    for name in ("a", "b"):
        bench.computed("p0", name, compute_s=0.1)
        bench.decoding("d0", name)
        bench.released("p0", name)
    found = bench.submit("c", 100)
    assert of(Place, found)[0].predicted_ttft_s == pytest.approx(0.13)  # 4.9 s were one of seven


#: A group of two takes 0.55 s for 1,000 tokens, and more than one instance for 100.
LATENCY = SpLatency(by_sp={1: Latency(b=1e-3), 2: Latency(a=0.05, b=0.5e-3)})


class Pair(Bench):
    """Two instances that may join for a gain of more than 30 %."""

    def __init__(self) -> None:
        config = SchedulerConfig(policy="fcfs", planner="single_chunk", improvement_rate=0.3)
        fleet = [instance(name, latency=LATENCY) for name in ("p0", "p1")]
        super().__init__(*fleet, instance("d0", pages=100_000), config=config)

    def group(self, name: str, tokens: int = 1000) -> tuple[str, ...]:
        """Submits a prompt; returns the instances that compute it."""
        [sent, *_] = of(RunPrefill, self.submit(name, tokens))
        return sent.chunks[-1].instance_ids

    def learn(self, factors: dict[int, float]) -> None:
        """Has prompts computed, by one instance and by two, each so many times as long as by the
        model of its degree.
        """
        for number in range(40):
            tokens = (67, 1000)[number % 2]
            members = self.group(f"r{number}", tokens)
            modelled_s = LATENCY.chunk_s(tokens, 0, len(members))
            seconds = factors[len(members)] * modelled_s
            self.computed(members[0], f"r{number}", compute_s=seconds)
            for name in members:
                self.released(name, f"r{number}")


@pytest.mark.parametrize(("factor", "size"), [(1.0, 2), (1.1, 2), (1.5, 1)])
def test_a_group_that_takes_longer_than_its_model_says_is_no_longer_chosen(factor, size):
    pair = Pair()
    pair.learn({1: 1.0, 2: factor})  # 1.1: 0.6 s, still a gain; 1.5: 0.83 s
    assert len(pair.group("a")) == size


def test_the_queues_of_a_slow_pool_are_compared_with_what_a_chunk_takes_there():
    pair = Pair()
    pair.learn({1: 3.0, 2: 3.0})
    assert len(pair.group("x", 67)) == 1  # 0.2 s
    assert len(pair.group("a")) == 2  # 0.2 + 1.65 s, 3 s alone; by the model 0.2 + 0.55, 1 s
