"""Another scheduler goes on where one has died or was paused, and no work is lost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.incarnation import Incarnation
from millrace.core.request import Chunk, RequestState, Shard
from millrace.core.scheduler import effects, events, reports
from millrace.core.scheduler.held import Held
from support.core_events import Bench, groups_of, instance, of, request
from support.seeds import seeds
from support.takeover_world import World

FLEET = (
    *(instance(f"p{i}", latency=groups_of(1, 2), node="n") for i in range(3)),
    *(instance(f"d{i}", pages=200) for i in range(2)),
    instance("m0", model="m"),
)


def run(world: World, rng: random.Random, steps: int) -> None:
    for _ in range(steps):
        world.now_s += 0.01
        possible = list(world.actions())
        if not possible:
            return
        rng.choice(possible)()


def world_of(rng: random.Random) -> World:
    config = SchedulerConfig(
        planner=rng.choice(["cdsp", "single_chunk"]),
        preemption=rng.choice(["none", "operator"]),
        policy=rng.choice(["fcfs", "s_edf", "millrace"]),
        improvement_rate=0.0,
    )
    return World(*FLEET, config=config)


@pytest.mark.parametrize("seed", seeds(15, 60))
def test_takeovers_lose_no_work_whenever_the_leader_dies(seed: int):
    rng = random.Random(seed)
    world = world_of(rng)
    for number in range(30):
        world.submit(f"r{number}", rng.choice([20, 100, 700]))
        run(world, rng, rng.randrange(12))
        if rng.random() < 0.25:
            take_over(world, rng, paused=rng.random() < 0.5)
    run(world, rng, 10_000)
    assert not world.open_requests()
    for name, client in world.clients.items():
        assert not client.failures, name
        assert client.tokens == client.spec.sampling.max_tokens, name
        assert client.computed == client.spec.prompt_tokens, f"{name} was computed again"
    assert not world.machine.requests
    world.now_s += 10_000.0
    world.step(events.Tick())
    assert not any(one.holdings for one in world.machine.cluster.instances.values())
    assert world.machine.release_timeouts == 0


def take_over(world: World, rng: random.Random, *, paused: bool) -> None:
    """The next leader hears of peers in any order, while instances and clients go on."""
    world.lose_leader(paused=paused)
    run(world, rng, rng.randrange(20))
    world.lead()
    peers = [*world.instances.values(), None]
    rng.shuffle(peers)
    for peer in peers:
        if peer is None:
            world.connect_proxy()
        else:
            world.connect(peer)
        run(world, rng, rng.randrange(4))
    for dead in world.instances.values():
        card = dead.card
        world.wake(events.InstanceLeft(instance_id=card.instance_id, generation=card.generation))
    world.former.clear()
    world.end_takeover()


def test_a_paused_leader_that_wakes_changes_nothing():
    world = World(instance("p0"), instance("d0"), config=SchedulerConfig())
    world.submit("r", 100)
    rng = random.Random(0)
    run(world, rng, 4)
    cancel = events.CancelRequested(
        request_id="r", reason="the client left", proxy_id=f"x#{world.epoch}"
    )
    world.lose_leader(paused=True)
    world.lead()
    for one in world.instances.values():
        world.connect(one)
    world.connect_proxy()
    world.end_takeover()
    world.wake(cancel)
    run(world, rng, 100)
    assert world.stale >= 2  # its cancels
    assert world.clients["r"].done and not world.clients["r"].failures


# ---- single cases


def held(request_id: str = "r", **fields: object) -> Held:
    return Held(request_id=request_id, prompt_tokens=100, max_new_tokens=28, choices=1, **fields)


def taken_over(*cards: events.InstanceJoined, **reopened: object) -> tuple[Bench, list]:
    bench = Bench()
    bench.step(events.TakeoverBegan())
    for card in cards:
        bench.step(card)
    bench.step(events.Reopened(request=request("r").request, **reopened))
    return bench, bench.step(events.TakeoverEnded())


def with_held(card: events.InstanceJoined, *parts: Held) -> events.InstanceJoined:
    return replace(card, held=parts)


def test_a_request_that_nobody_holds_begins_again():
    bench, found = taken_over(instance("p0"), instance("d0"))
    assert [one.decode_id for one in of(effects.Place, found)] == ["d0"]
    assert bench.serve("r")
    assert not bench.machine.requests


def test_a_request_with_tokens_that_nobody_holds_is_migrated():
    bench, found = taken_over(instance("p0"), instance("d0"), token_age_s=2.0)
    (failed,) = of(effects.Fail, found)
    assert failed.resumable
    assert not bench.machine.requests


def test_a_token_of_an_earlier_attempt_is_none_of_an_attempt_that_nobody_computes():
    cards = (instance("p0"), with_held(instance("d0"), held(attempt=2)))
    bench, found = taken_over(*cards, decode=Incarnation("d0", 1), token_age_s=2.0)
    (failed,) = of(effects.Fail, found)
    assert failed.resumable
    assert [one.instance_id for one in of(effects.CancelOn, found)] == ["d0"]
    assert not bench.machine.requests


@pytest.mark.parametrize(("attempts", "next_attempt"), [(0, 3), (500, 501)])
def test_kept_tokens_survive_the_loss_of_prefill(attempts, next_attempt):
    parts = held(attempt=2, landed_tokens=80)
    cards = (instance("p0"), with_held(instance("d0"), parts))
    bench, found = taken_over(*cards, attempts=attempts)
    (admit,) = of(effects.AdmitDecode, found)
    assert (admit.attempt, admit.kept_tokens) == (next_attempt, 80)
    (run_prefill,) = of(effects.RunPrefill, found)
    assert run_prefill.chunks[0].start_token == 80
    assert bench.machine.requests["r"].state is RequestState.PREFILLING


@pytest.mark.parametrize(("proxy", "left"), [("x", []), ("y", ["r", "s"])])
def test_a_cancel_is_its_own_proxy_s(proxy: str, left: list[str]) -> None:
    bench = Bench()
    bench.step(events.TakeoverBegan())
    bench.step(instance("p0"))
    bench.step(instance("d0"))
    bench.step(events.Reopened(request=request("r").request))
    bench.submit("s")
    for name in "rs":
        bench.cancel(name, proxy=proxy)
    bench.step(events.TakeoverEnded())
    assert list(bench.machine.requests) == left


def test_caches_that_are_reported_meanwhile_are_known_afterwards():
    bench = Bench()
    bench.step(events.TakeoverBegan())
    for name in ("p0", "d0", "d1"):
        bench.step(instance(name, block_tokens=16))
    bench.report("d1", reports.CachedBlocks(whole=True, added=tuple(range(40, 50))))
    bench.step(events.TakeoverEnded())
    found = bench.submit("r", 170, prefix=tuple(range(40, 50)))
    (admit,) = of(effects.AdmitDecode, found)
    assert (admit.instance_id, admit.kept_tokens) == ("d1", 160)


def test_what_no_proxy_names_is_dropped_before_its_pages_are_given_away():
    bench = Bench()
    bench.step(events.TakeoverBegan())
    bench.step(with_held(instance("d0"), held("lost", decoding=True, first_token=True)))
    found = bench.step(events.TakeoverEnded())
    assert [(one.instance_id, one.request_id) for one in of(effects.CancelOn, found)] == [
        ("d0", "lost")
    ]
    decode = bench.machine.cluster.instances["d0"]
    assert decode.booked_pages == 8
    bench.released("d0", "lost", attempt=1)
    assert decode.booked_pages == 0


def test_an_instance_that_comes_back_to_the_same_leader_drops_what_was_given_up():
    bench = Bench(instance("p0"), instance("d0"))
    bench.submit("r")
    bench.died("d0")
    found = bench.step(with_held(instance("d0"), held()))
    assert of(effects.CancelOn, found)[0].request_id == "r"
    assert not of(effects.AdmitDecode, found)  # it still holds the earlier attempt
    bench.released("p0", "r")
    (admit,) = of(effects.AdmitDecode, bench.released("d0", "r", attempt=1))
    assert admit.attempt == 2


@pytest.mark.parametrize("attempts", [0, 500])
def test_an_instance_that_comes_late_still_gets_what_it_is_dropping(attempts):
    """Its proxy names the request after the takeover, while the only instances cancel it."""
    whole = Chunk(index=0, start_token=0, num_tokens=100, instance_ids=("p0",))
    parts = held(chunks=(whole,)), held()
    bench = Bench(*map(with_held, (instance("p0"), instance("d0")), parts))
    found = bench.step(events.Reopened(request=request("r").request, attempts=attempts))
    assert not of(effects.Refuse, found)
    bench.released("p0", "r")
    (admit,) = of(effects.AdmitDecode, bench.released("d0", "r", attempt=1))
    assert admit.request_id == "r"


@pytest.mark.parametrize("in_takeover", [True, False])
def test_no_attempt_has_the_number_of_one_at_an_instance_that_is_not_back(in_takeover):
    """The store has lost its data, or p1 is late: it may compute a former leader's attempt."""
    bench = Bench()
    if in_takeover:
        bench.step(events.TakeoverBegan())
    bench.step(instance("p0"))
    bench.step(instance("d0"))
    found = bench.step(events.Reopened(request=request("r").request, attempts=500))
    if in_takeover:
        found = bench.step(events.TakeoverEnded())
    (admit,) = of(effects.AdmitDecode, found)
    assert admit.attempt == 501
    assert bench.serve("r")


def test_a_request_that_finishes_meanwhile_is_over():
    bench = Bench()
    bench.step(events.TakeoverBegan())
    bench.step(with_held(instance("d0"), held(decoding=True, first_token=True)))
    bench.finished("d0", "r", "length")
    reopened = events.Reopened(
        request=request("r").request, token_age_s=1.0, decode=Incarnation("d0", 1)
    )
    bench.step(reopened)
    found = bench.step(events.TakeoverEnded())
    assert [one.state for one in of(effects.Record, found)] == [RequestState.FINISHED]
    assert not of(effects.Fail, found)


@pytest.mark.parametrize("decode", [None, Incarnation("d1", 1), Incarnation("d0", 2)])
@pytest.mark.parametrize("has_tokens", [True, False])
def test_an_attempt_that_finishes_where_the_proxy_does_not_read_is_not_the_end(decode, has_tokens):
    """The former leader had given d0 up, and placed the request elsewhere."""
    bench = Bench()
    bench.step(events.TakeoverBegan())
    for one in (instance("p0"), instance("d1"), instance("d0")):
        bench.step(
            with_held(one, held(decoding=True, first_token=True))
            if one.instance_id == "d0"
            else one
        )
    bench.finished("d0", "r", "length")
    age_s = 1.0 if has_tokens else None
    spec = request("r").request
    bench.step(events.Reopened(request=spec, token_age_s=age_s, decode=decode, attempts=500))
    found = bench.step(events.TakeoverEnded())
    if has_tokens:
        (failed,) = of(effects.Fail, found)
        assert failed.resumable
        return
    assert not of(effects.Fail, found)
    (admit,) = of(effects.AdmitDecode, found)
    assert admit.attempt == 501
    assert bench.serve("r")


def test_a_proxy_that_connects_again_keeps_its_requests():
    bench = Bench(instance("p0"), instance("d0"))
    bench.submit("r")
    again = request("r", proxy="x#2").request
    bench.step(events.Reopened(request=again))
    bench.step(events.ProxyLeft(proxy_id="x"))
    assert bench.machine.requests["r"].proxy_id == "x#2"
    bench.step(events.ProxyLeft(proxy_id="x#2"))
    assert not bench.machine.requests


def test_new_requests_wait_for_the_end_of_a_takeover():
    bench = Bench()
    bench.step(events.TakeoverBegan())
    bench.step(instance("p0"))
    bench.step(instance("d0"))
    assert not bench.submit("new")
    bench.report("d0", reports.Heartbeat())
    found = bench.step(events.TakeoverEnded())
    assert [one.request_id for one in of(effects.Place, found)] == ["new"]


def test_members_get_an_order_as_the_former_leader_may_have_sent_another() -> None:
    members = ("p0", "p1")
    cards = [instance(name, latency=groups_of(1, 2), node="n") for name in members]
    bench = Bench(config=SchedulerConfig(policy="s_edf"))
    bench.step(events.TakeoverBegan())
    whole = Chunk(index=0, start_token=0, num_tokens=100, instance_ids=members)
    parts = [held(name, chunks=(whole,), decode=Incarnation("d0", 1)) for name in ("a", "b")]
    for card in cards:
        bench.step(with_held(card, *parts))
    bench.step(with_held(instance("d0"), held("a"), held("b")))
    for name in ("b", "a"):
        bench.step(events.Reopened(request=request(name).request))
    found = bench.step(events.TakeoverEnded())
    orders = {one.instance_id: one.queue for one in of(effects.Order, found)}
    assert set(orders) == set(members)
    assert orders["p0"] == orders["p1"]


def test_an_adopted_shard_is_asked_for_again_when_its_request_ends() -> None:
    """Its release may have been reported to the former leader, or during the takeover."""
    shards = (
        Shard(worker_id="d0", start_token=0, end_token=64),
        Shard(worker_id="k0", start_token=64, end_token=128),
    )
    here = Incarnation("d0", 1)
    whole = held(shards=shards, first_token=True, decoding=True)
    bench, _ = taken_over(
        instance("p0"),
        with_held(instance("d0"), whole),
        instance("k0"),
        decode=here,
        token_age_s=1.0,
    )
    end = reports.RequestFinished(request_id="r", reason="length", generated_tokens=28)
    found = bench.report("d0", end)
    assert [(one.instance_id, one.request_id) for one in of(effects.CancelOn, found)] == [
        ("k0", "r")
    ]
    bench.report("k0", reports.RequestReleased(request_id="r"))
    assert not bench.machine.cluster.instances["k0"].holdings
