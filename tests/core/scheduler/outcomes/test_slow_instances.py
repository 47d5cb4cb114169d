"""A prefill instance that lags gets pauses and probes, and takes work again when it has caught up.

Every prompt has 100 tokens, which the profile expects to take 0.1 s; `FLOOR_S` is 0.02 s.
"""

from __future__ import annotations

from millrace.core.config import SchedulerConfig
from millrace.core.scheduler import effects
from support.core_events import Bench, instance, of

CONFIG = SchedulerConfig(
    slow_factor=3.0, breaker_pause_s=2.0, tasks_ahead=1, batch_tokens=0, planner="least_queue"
)
SLOW_S, USUAL_S = 1.0, 0.1


class Pair:
    """Two prefill instances, of which p0 takes `slow_s` for a prompt."""

    def __init__(self, config: SchedulerConfig = CONFIG, *names: str) -> None:
        cards = map(instance, names or ("p0", "p1", "d0"))
        self.bench = Bench(*cards, config=config)
        self.slow_s = SLOW_S
        self.count = 0

    @property
    def state(self) -> str:
        return self.bench.machine.slow_instances.state("p0")

    def submit(self) -> tuple[str, str]:
        """Returns the id of one more prompt, and the instance that gets it."""
        self.count += 1
        (run,) = of(effects.RunPrefill, self.bench.submit(f"r{self.count}"))
        return run.request_id, run.instance_id

    def compute(self, request_id: str, name: str) -> None:
        bench, taken_s = self.bench, self.slow_s if name == "p0" else USUAL_S
        bench.chunk_started(name, request_id)
        bench.now_s += taken_s
        bench.computed(name, request_id, compute_s=taken_s)
        bench.released(name, request_id, complete=True)
        bench.decoding("d0", request_id)
        bench.finished("d0", request_id)

    def both(self) -> list[str]:
        """Two prompts at once; returns the instances that got them."""
        prompts = [self.submit(), self.submit()]
        for request_id, name in prompts:
            self.compute(request_id, name)
        return [name for _, name in prompts]

    def one(self) -> str:
        request_id, name = self.submit()
        self.compute(request_id, name)
        return name


def lagging() -> Pair:
    """p0 has lagged three times."""
    pair = Pair()
    for _ in range(3):
        assert pair.state == "closed"
        assert sorted(pair.both()) == ["p0", "p1"]
    assert pair.state == "open"
    return pair


def test_it_gets_nothing_in_a_pause_and_one_prompt_after_it() -> None:
    pair = lagging()
    assert [pair.one() for _ in range(10)] == ["p1"] * 10
    pair.bench.tick(2.0)
    assert pair.state == "half_open"
    busy, probe = pair.submit(), pair.submit()
    assert sorted((busy[1], probe[1])) == ["p0", "p1"]
    assert pair.state == "open"  # it computes its probe
    for prompt in (busy, probe):
        pair.compute(*prompt)


def test_pauses_are_twice_as_long_after_each_probe_that_lags() -> None:
    pair = lagging()
    for pause_s in (2.0, 4.0, 8.0):
        pair.bench.tick(pause_s - 0.2)
        assert pair.state == "open"
        pair.bench.tick(0.3)
        assert pair.state == "half_open"
        assert "p0" in pair.both()
        assert pair.state == "open"


def test_after_two_probes_in_time_it_is_slow_no_more() -> None:
    pair = lagging()
    pair.bench.tick(2.0)
    pair.slow_s = USUAL_S
    assert "p0" in pair.both()
    assert pair.state == "half_open"
    assert "p0" in pair.both()
    assert pair.state == "closed"


def test_a_chunk_that_does_not_end_counts_while_it_runs() -> None:
    pair = Pair()
    request_id, name = pair.submit()
    pair.bench.chunk_started(name, request_id)
    pair.bench.tick(0.3)
    assert pair.bench.machine.slow_instances.state(name) == "closed"
    pair.bench.tick(0.1)
    assert pair.bench.machine.slow_instances.state(name) == "open"
    pair.bench.computed(name, request_id, compute_s=0.4)
    pair.bench.tick(0.1)
    assert pair.bench.machine.slow_instances.state(name) == "closed"  # once is no habit


def test_the_last_instance_of_a_pool_always_takes_work() -> None:
    pair = Pair(CONFIG, "p0", "d0")
    assert [pair.one() for _ in range(9)] == ["p0"] * 9
    assert pair.state == "closed"


def test_an_instance_that_left_is_forgotten() -> None:
    pair = lagging()
    pair.bench.died("p0")
    assert pair.state == "closed"
    pair.bench.step(instance("p0", generation=2))
    assert pair.state == "closed"
