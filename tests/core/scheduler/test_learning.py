"""The scheduler's predictions follow the times that its instances take."""

from __future__ import annotations

import pytest

from millrace.core.scheduler.effects import Place
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
