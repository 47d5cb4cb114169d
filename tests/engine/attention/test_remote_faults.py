"""A lost KVP worker costs the sequences that need it, and no other token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from millrace.engine.decode_batch import DecodeBatch
from millrace.engine.forward.local_runner import ModelRunner
from millrace.engine.forward.stage_passes import StagePasses
from millrace.engine.model.loader import load_model
from millrace.engine.sampling.sampler import Sampler
from support.deadlines import HANG_S
from support.kvp_world import KvpWorker, Long, World, prefill_long, sequence_of, world
from support.tiny_engine import Request, greedy, make_pool
from support.tiny_models import model_folder, prompt

STEPS = 12


class Scene:
    """A request on KVP worker 0, another on KVP worker 1 and a short one, with the expected
    answers.
    """

    def __init__(self, made: World) -> None:
        self.made = made
        runner = made.runner
        alone = ModelRunner(
            StagePasses(runner.model, make_pool(runner.model, page_tokens=8, num_pages=128))
        )
        prompts = [prompt(40 + i, seed=i) for i in range(3)]
        self.expected = greedy(alone, [Request(alone, p, STEPS) for p in prompts], STEPS)
        self.batch = DecodeBatch(runner, runner.pool, Sampler(), max_batch=4)
        self.requests = [
            Long(made, prompts[0], (24, 64), made.workers[:1]),
            Long(made, prompts[1], (32, 64), made.workers[1:]),
            Long(made, prompts[2], (64,)),
        ]
        for i, request in enumerate(self.requests):
            first = int(prefill_long(runner, request, (30,)).argmax())
            self.batch.add(sequence_of(request, str(i), first, STEPS))

    def run(self) -> dict[str, list[int]]:
        """Tokens after the first, by request; -1 for one that was lost."""
        found: dict[str, list[int]] = {"0": [], "1": [], "2": []}
        while self.batch.size:
            for out in self.batch.step():
                assert (out.finish_reason == "lost") == (out.token_id == -1)
                assert "worker-0" in out.error or out.token_id != -1
                found[out.request_id].append(out.token_id)
            self.batch.check_integrity()
        return found

    def check(self, found: dict[str, list[int]], lost_after: int) -> None:
        for i in (1, 2):
            assert found[str(i)] == self.expected[i][1:]
        assert found["0"] == [*self.expected[0][1 : 1 + lost_after], -1]


@pytest.fixture
def scene(request):
    """A test gives the time for an answer by `indirect`."""
    timeout_s = getattr(request, "param", 10 * HANG_S)
    with world(load_model(model_folder("llama"), device="cpu"), 2, timeout_s=timeout_s) as made:
        yield Scene(made)


def at_layer(worker: KvpWorker, count: int, act: Callable[[], None]) -> None:
    """Has the KVP worker call `act` when it is asked for the `count`-th layer from now on."""
    attend, calls = worker.attention.layer, iter(range(count, -1, -1))

    def layer(slot: int, piece: int, number: int):
        if next(calls, -1) == 0:
            act()
        return attend(slot, piece, number)

    worker.attention.layer = layer


@pytest.mark.parametrize("layers", [0, 4, 7])
def test_a_worker_that_dies_in_the_middle_of_a_pass(scene, layers):
    worker = scene.made.workers[0]
    at_layer(worker, layers, worker.transport.close)
    scene.check(scene.run(), lost_after=layers // 3)
    assert "worker-0" in scene.made.owner.lost
    assert scene.made.owner.exchange.workers()["worker-1"] == ""


def test_those_that_are_left_need_no_worker(scene):
    """A loss in one step does not affect the next step, even if another request has the slot."""
    scene.batch.remove("1")
    at_layer(scene.made.workers[0], 4, scene.made.workers[0].transport.close)
    found = scene.run()
    assert found["0"] == [scene.expected[0][1], -1]
    assert found["2"] == scene.expected[2][1:]


@pytest.mark.parametrize("scene", [3.0], indirect=True)  # the other worker answers in time
def test_a_worker_that_does_not_answer_in_time_and_its_late_partial(scene):
    """A late partial is of a pass that is over: it changes nothing and finds no memory."""
    made, worker, go_on = scene.made, scene.made.workers[0], threading.Event()
    at_layer(worker, 4, lambda: go_on.wait(HANG_S))
    outs = scene.batch.step() + scene.batch.step()
    assert [o.error for o in outs if o.finish_reason] == ["worker-0 did not answer within 3 s"]
    made.owner.exchange.detach("worker-0")
    before = made.owner.exchange.offer()
    made.owner.exchange.withdraw(before)
    go_on.set()
    slot = asyncio.run(made.owner.attach(worker))
    assert slot != made.slots[0]
    first = int(prefill_long(made.runner, scene.requests[0], (30,)).argmax())
    scene.batch.add(sequence_of(scene.requests[0], "0", first, STEPS))
    found = scene.run()
    assert found["0"] == scene.expected[0][1:]
    assert found["2"] == scene.expected[2][3:]


def test_a_shard_that_was_let_go_costs_its_request_alone(scene):
    made, shard = scene.made, scene.requests[0].shards[0].shard
    other = Long(made, prompt(40, seed=9), (24, 64), made.workers[:1])
    first = int(prefill_long(made.runner, other, ()).argmax())
    scene.batch.add(sequence_of(other, "3", first, 3))
    worker = made.workers[0]
    at_layer(worker, 1, lambda: threading.Thread(target=worker.close_shard, args=(shard,)).start())
    outs = [scene.batch.step() for _ in range(2)]
    ends = {o.request_id: o.finish_reason for step in outs for o in step if o.finish_reason}
    assert ends == {"0": "lost", "3": "length"}
    assert made.owner.exchange.workers() == {"worker-0": "", "worker-1": ""}


def test_losing_a_worker_ends_the_wait_at_once(scene):
    worker, go_on = scene.made.workers[0], threading.Event()
    exchange = scene.made.owner.exchange

    def lose() -> None:
        exchange.lose("worker-0", "worker-0: its stream broke")
        go_on.wait(HANG_S)

    at_layer(worker, 4, lose)
    try:
        scene.check(scene.run(), lost_after=1)
    finally:
        go_on.set()


def test_a_pass_that_is_given_up_leaves_nothing_behind(scene):
    """The next pass waits for messages in flight, and its partials are its own."""
    for stop in (3, 5, 8):
        steps = scene.made.runner.prefill_batch([scene.requests[0].task(20, 38)])
        for _ in range(stop):
            next(steps)
        steps.close()
    assert scene.run() == {str(i): answer[1:] for i, answer in enumerate(scene.expected)}


def test_closing_a_shard_waits_for_what_computes_over_its_pages(scene):
    worker, go_on, begun = scene.made.workers[0], threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go_on.wait(HANG_S)

    at_layer(worker, 0, hold)
    stepping = threading.Thread(target=scene.batch.step)
    stepping.start()
    begun.wait(HANG_S)
    closed = worker.server.close_shard(scene.requests[0].shards[0].shard)
    assert not closed.done()
    go_on.set()
    closed.result(HANG_S)
    stepping.join()
