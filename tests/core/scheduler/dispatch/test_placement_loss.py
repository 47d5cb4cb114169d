"""Placement by predicted loss: what a plain calculation says, and nobody waits for ever."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.config import SchedulerConfig
from millrace.core.cost.decode_step import DecodeStepTime
from millrace.core.scheduler.effects import Place
from millrace.core.scheduler.fleet.instances import DecodeInstance
from support.core_events import Bench, instance, of, request

#: 10 ms a step, 1 ms a sequence, 1 ms for 100 tokens of context.
STEP = DecodeStepTime.of((0.01, 0.001, 1e-5))
SLOWER = DecodeStepTime.of((0.02, 0.001, 1e-5))

paces = st.sampled_from([None, None, 0.012, 0.02, 0.03, 0.05, 0.2])
asked_for = st.fixed_dictionaries(
    {
        "prompt": st.integers(1, 900),
        "new": st.integers(1, 200),
        "tbt_s": paces,
        "ttft_s": st.sampled_from([None, None, 0.2, 1.5, 5.0, 60.0]),
        "e2e_s": st.sampled_from([None, None, None, 0.5, 4.0, 60.0]),
    }
)
happenings = st.lists(
    st.one_of(
        st.tuples(st.just("arrives"), asked_for),
        st.tuples(st.just("ends"), st.integers(0, 20)),
        st.tuples(st.just("passes"), st.sampled_from([0.1, 0.5, 1.0, 3.0])),
    ),
    max_size=30,
)


def fleet(policy: str, reserve: str = "whole") -> Bench:
    config = SchedulerConfig(
        policy=policy, decode_reserve=reserve, batch_tokens=0, request_timeout_s=1e6
    )
    return Bench(
        instance("p0", pages=100_000),
        instance("d0", pages=400, decode_step=STEP),
        instance("d1", pages=200, decode_step=SLOWER),
        instance("m0", pages=200, decode_step=STEP),
        config=config,
    )


def serve(made: Bench, name: str) -> None:
    """Plays a placed request to its end, wherever it is."""
    asked = made.machine.requests[name]
    home = asked.decode_id
    at = asked.chunks[0].instance_ids[0] if asked.chunks else None
    if home is None or at is None:
        return
    made.chunk_started(at, name)
    made.computed(at, name)
    if at != home:
        made.released(at, name)
    made.decoding(home, name)
    made.now_s += 0.01
    made.finished(home, name)


def play(made: Bench, what: list) -> None:
    for number, (kind, value) in enumerate(what):
        if kind == "arrives":
            fields = dict(value)
            prompt, new = fields.pop("prompt"), fields.pop("new")
            made.submit(f"r{number}", prompt, new, **fields)
        elif kind == "passes":
            made.tick(value)
        elif placed := [one.id for one in made.machine.requests.values() if one.chunks]:
            serve(made, placed[value % len(placed)])


@settings(deadline=None)
@given(
    st.sampled_from(["fcfs", "s_edf", "millrace"]), st.sampled_from(["whole", "grow"]), happenings
)
def test_every_request_ends_once_those_placed_before_it_end(policy, reserve, what):
    """Without further arrivals, each round of ends lets at least one more request in."""
    made = fleet(policy, reserve)
    play(made, what)
    while made.machine.requests:
        placed = [one.id for one in made.machine.requests.values() if one.chunks]
        assert placed, "nothing runs, and requests wait"
        for name in placed:
            if name in made.machine.requests:
                serve(made, name)
    made.machine.check_integrity()


@pytest.mark.parametrize("policy", ["fcfs", "millrace"])
def test_the_wait_for_others_paces_is_bounded_by_the_answers_there(policy):
    """A request that waits keeps an instance, so tight paces don't pass it for ever."""
    made = Bench(
        instance("p0", pages=100_000),
        instance("d0", pages=1000, decode_step=STEP),
        config=SchedulerConfig(policy=policy, batch_tokens=0, tasks_ahead=64),
    )
    made.submit("a", 100, 20, tbt_s=0.02)
    made.submit("b", 900, 20)  # 21 ms with it: a would miss
    assert made.machine.requests["b"].decode_id is None
    for number in range(200):  # one more of a's kind with every one that ends
        made.submit(f"c{number}", 100, 20, tbt_s=0.02)
        made.tick(1.0)
        placed = next(one.id for one in made.machine.requests.values() if one.decode_id)
        if placed == "b":
            break
        serve(made, placed)
    assert number < 60


def plain_losses(one: DecodeInstance, asked) -> tuple[int, int]:
    """The paces that the placement breaks by the definition, and those of them that a wait saves.

    Under fcfs all requests are worth 1.
    """
    step, pace_s = one.card.decode_step, asked.slo.tbt_s or math.inf
    tokens = asked.prompt_tokens + asked.max_new_tokens
    after_s = step.seconds(one.sequences + 1, one.context_tokens + tokens)
    before_s = step.seconds(one.sequences, one.context_tokens)
    others = sum(before_s <= holding.tbt_s < after_s for holding in one.holdings.values())
    own = pace_s < after_s
    return others + own, others + (own and pace_s >= step.seconds(1, tokens))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(1, 200), paces), max_size=12),
    st.tuples(st.integers(1, 900), st.integers(1, 200), paces),
)
def test_it_goes_where_the_fewest_paces_break(before, last):
    made = Bench(
        instance("p0", pages=100_000),
        instance("d0", pages=900, decode_step=STEP),
        instance("d1", pages=700, decode_step=SLOWER),
        config=SchedulerConfig(policy="fcfs", batch_tokens=0, tasks_ahead=64),
    )
    for number, (prompt, new, tbt_s) in enumerate(before):
        made.submit(f"r{number}", prompt, new, tbt_s=tbt_s)
    if any(one.decode_id is None for one in made.machine.requests.values()):
        return  # others keep instances
    asked = request("last", last[0], last[1], tbt_s=last[2], arrival_s=made.now_s)
    owners = list(made.machine.cluster.pools["h"].decode.values())
    losses = {one.id: plain_losses(one, asked.request) for one in owners}
    taking = [
        one.id for one in owners if not one.sequences or not losses[one.id][1]
    ]  # without a wait
    placed = of(Place, made.step(asked))
    assert bool(placed) == bool(taking)
    if placed:
        assert placed[0].decode_id in taking
        assert losses[placed[0].decode_id][0] == min(losses[name][0] for name in taking)
