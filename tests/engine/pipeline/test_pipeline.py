"""A staged model gives the results of the whole model, with any passes in its pipeline."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from millrace.core.errors import IntegrityError, TransferError
from millrace.engine.decode_batch import DecodeBatch
from millrace.engine.errors import EngineDied
from millrace.engine.forward.mixed_pass import NO_DECODES, DecodeRows
from millrace.engine.forward.passes import Boundary
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.kv.step_tables import page_table_of
from millrace.engine.model.loader import load_model
from millrace.engine.pipeline.in_flight import StageError
from millrace.engine.runner import Runner
from millrace.engine.sampling.sampler import Sampler
from support.deadlines import HANG_S
from support.kvp_world import Long, random_cuts, sequence_of, world
from support.parallel import open_runner, split_folder, storm
from support.ring_group import Member, RingGroup, plan
from support.tiny_engine import Request, decode, greedy, make_runner, prefill
from support.tiny_models import model_folder, prompt


def assert_same(found: torch.Tensor, wanted: torch.Tensor, ranks: int) -> None:
    """Compares to the bit, where no sum was split over ranks."""
    tolerance = 0.0 if ranks == 1 else 1e-4
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("count", "ranks", "own"), [(2, 1, False), (2, 1, True), (4, 1, True), (2, 2, False)]
)
def test_prefill_in_chunks_and_decode_give_the_whole_models_logits(
    five_layers, count, ranks, own, staged
) -> None:
    wanted, one = make_runner(five_layers), staged(five_layers, count, ranks, own_pools=own)
    ours, theirs = (Request(r, prompt(90), room=8) for r in (one.runner, wanted))
    cuts = (17, 33, 70, 89)  # the last chunk is of one token
    assert_same(prefill(one.runner, ours, cuts), prefill(wanted, theirs, cuts), ranks)
    for _ in range(6):
        for request in (ours, theirs):
            request.tokens.append(5 + len(request.tokens) % 7)
        assert_same(decode(one.runner, [ours]), decode(wanted, [theirs]), ranks)
    assert_same(one.kv(ours.pages), wanted.pool.storage[:, theirs.pages], ranks)
    source, (target,) = ours.pages[0], one.runner.pool.allocate(1)
    one.runner.copy_page(source, target)
    assert torch.equal(one.kv([target]), one.kv([source]))
    one.check_settled()


def test_stages_of_ranks_have_pools_of_their_own_and_copy_pages_in_all(five_layers, staged) -> None:
    """A copied page is read by later steps: it holds what every rank of every stage has copied."""
    wanted, one = make_runner(five_layers), staged(five_layers, 2, 2, own_pools=True)
    ours, theirs = (Request(r, prompt(40), room=4) for r in (one.runner, wanted))
    assert_same(prefill(one.runner, ours, (17,)), prefill(wanted, theirs, (17,)), ranks=2)
    copies = one.runner.pool.allocate(len(ours.pages))
    for source, target in zip(ours.pages, copies, strict=True):
        one.runner.copy_page(source, target)
    ours.pages = copies
    for token in (3, 4):
        for request in (ours, theirs):
            request.tokens.append(token)
        assert_same(decode(one.runner, [ours]), decode(wanted, [theirs]), ranks=2)
    one.check_settled()


def test_a_page_without_a_holder_is_copied_nowhere(five_layers, staged) -> None:
    one = staged(five_layers, 2, own_pools=True)
    request = Request(one.runner, prompt(20))
    with pytest.raises(IntegrityError, match="KV page 63 is not held by anyone"):
        one.runner.copy_page(request.pages[0], 63)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen2-yarn-window", "qwen3-moe", "llama3-rope-tied"])
def test_every_family_is_staged(name, dtype, staged) -> None:
    wanted = make_runner(model_folder(name), dtype=dtype)
    one = staged(model_folder(name), 3, dtype=dtype)
    requests = [Request(one.runner, prompt(40), room=3), Request(wanted, prompt(40), room=3)]
    found = prefill(one.runner, requests[0], (9,)), prefill(wanted, requests[1], (9,))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    for request in requests:
        request.tokens.append(11)
    logits = [decode(r, [q]) for r, q in zip((one.runner, wanted), requests, strict=True)]
    if dtype == "float32":
        assert torch.equal(*logits)
    else:  # the sum that is handed on is rounded where the whole model rounds it, too
        torch.testing.assert_close(*logits, rtol=0.02, atol=0.02)
    one.check_settled()


def test_every_stage_records_its_steps_though_their_tables_come_anew(
    five_layers, staged, replayed
) -> None:
    wanted, one = make_runner(five_layers), staged(five_layers, 3)
    runners = one.runner, wanted
    requests = [Request(runner, prompt(20)) for runner in runners]
    for runner, request in zip(runners, requests, strict=True):
        prefill(runner, request)
    for number in range(60):
        if number % 20 == 10:  # other passes come between, and need their own memory
            others = [prefill(runner, Request(runner, prompt(30))) for runner in runners]
            assert torch.equal(*others)
        for runner, request in zip(runners, requests, strict=True):
            request.tokens.append(7 + number % 11)
            if len(request.tokens) > 16 * len(request.pages):  # the table grows wider
                request.pages += runner.pool.allocate(1)
        assert torch.equal(*(decode(r, [q]) for r, q in zip(runners, requests, strict=True)))
    assert len(replayed) == 3 * (60 - 3)  # new ones for two, four and eight pages
    one.check_settled()


@pytest.mark.parametrize(("count", "ranks"), [(3, 1), (2, 2)])
def test_prompt_logprobs_want_every_row_of_the_last_stage(
    five_layers, count, ranks, staged
) -> None:
    wanted, one = make_runner(five_layers), staged(five_layers, count, ranks)
    found = []
    for runner in (one.runner, wanted):
        tasks = [
            Request(runner, prompt(30)).task(0, 30, want_logits=more) for more in (True, False)
        ]
        for task in tasks:
            task.want_hidden = True
            for _ in runner.prefill_batch([task]):
                pass
            assert task.hidden is not None
        alone, both = tasks[1].hidden, tasks[0].hidden
        assert tasks[0].logits is not None and tasks[1].logits is None
        found.append((runner.project(both), tasks[0].logits, both, alone))
    for ours, theirs in zip(*found, strict=True):
        assert_same(ours, theirs, ranks)


@pytest.mark.parametrize(("count", "ranks"), [(4, 1), (2, 2)])
def test_random_batches_of_decodes_and_chunks_are_the_whole_models(
    five_layers, count, ranks, staged
) -> None:
    wanted = make_runner(five_layers, num_pages=200)
    one = staged(five_layers, count, ranks, num_pages=200)
    rng = random.Random(5)
    pairs = [
        (
            Request(one.runner, prompt(n, seed=n), room=30),
            Request(wanted, prompt(n, seed=n), room=30),
        )
        for n in (40, 7, 65)
    ]
    done = [0, 0, 0]
    while min(end - len(p[0].tokens) for end, p in zip(done, pairs, strict=True)) < 0:
        ready = [i for i, p in enumerate(pairs) if done[i] >= len(p[0].tokens) - 1]
        waiting = [i for i in range(3) if i not in ready]
        chunks = {i: min(rng.randint(1, 20), len(pairs[i][0].tokens) - done[i]) for i in waiting}
        logits = []
        for side, runner in enumerate((one.runner, wanted)):
            requests = [p[side] for p in pairs]
            tasks = [requests[i].task(done[i], done[i] + n) for i, n in chunks.items()]
            rows = DecodeRows(
                token_ids=torch.tensor([requests[i].tokens[-1] for i in ready], dtype=torch.int64),
                positions=torch.tensor([done[i] for i in ready], dtype=torch.int64),
                kv_lens=torch.tensor([done[i] + 1 for i in ready], dtype=torch.int32),
            )
            table = page_table_of([requests[i].pages for i in (*ready, *chunks)])
            decoded = runner.mixed(rows, table, tasks)
            logits.append([*decoded, *(task.logits for task in tasks)])
        for ours, theirs in zip(*logits, strict=True):
            assert_same(ours, theirs, ranks)
        for i, n in chunks.items():
            done[i] += n
        for row, i in enumerate(ready):
            done[i] += 1
            if len(pairs[i][0].tokens) < 80:
                for request in pairs[i]:
                    request.tokens.append(int(logits[1][row].argmax()))
    one.check_settled()


def test_the_next_chunk_enters_as_one_leaves_the_first_stage(five_layers, staged) -> None:
    """While the later stages stand still, the first takes in as many passes as there are slots."""
    one = staged(five_layers, 2)
    gate, held = threading.Event(), threading.Event()
    original, later = one.rows[0].on_rows, ThreadPoolExecutor(1)  # in the order of their coming

    def stall(handed) -> None:
        held.set()
        later.submit(lambda: (gate.wait(HANG_S), original(handed)))

    one.rows[0].on_rows = stall
    request = Request(one.runner, prompt(48))
    layers: list[int] = []
    for start, stop in pairwise((0, 16, 32)):
        task = request.task(start, stop, want_logits=False)
        task.on_layer = layers.append
        for _ in one.runner.prefill_batch([task]):  # ends here, with its later layers still to come
            pass
    assert held.is_set() and not layers and len(one.runner.in_flight) == 2
    gate.set()
    last = request.task(32, 48)
    last.on_layer = layers.append
    for _ in one.runner.prefill_batch([last]):
        pass
    assert layers == [2, 3, 4] * 3  # before the last one's logits, all layers of all chunks
    later.shutdown()
    one.check_settled()


def test_a_pass_whose_kv_is_awaited_ends_with_its_last_layer(five_layers, staged) -> None:
    one, layers = staged(five_layers, 3), []
    task = Request(one.runner, prompt(20)).task(0, 20, want_logits=False)
    task.awaits_kv, task.on_layer = True, layers.append
    gate, original = threading.Event(), one.rows[1].on_rows
    one.rows[1].on_rows = lambda handed: (gate.wait(HANG_S), original(handed))
    for boundary in one.runner.prefill_batch([task]):
        if boundary.awaited is not None:
            assert not boundary.awaited.wait(0.1)  # its last stage has no rows yet
            gate.set()
            assert boundary.awaited.wait(HANG_S)
    assert sorted(layers) == [1, 2, 3, 4]
    one.check_settled()


def test_what_waits_in_a_later_stage_yields_to_what_is_first_in_the_order(
    five_layers, staged
) -> None:
    one = staged(five_layers, 2)
    steps: list[str] = []
    passes = one.passes[1]
    begun = threading.Event()
    go_on = threading.Event()

    original = passes.run

    def slow(tables, **arguments):
        name = "long" if len(tables.positions) > 20 else "short"
        for boundary in original(tables, **arguments):
            steps.append(name)
            if name == "long" and not begun.is_set():
                begun.set()
                assert go_on.wait(HANG_S)
            yield boundary

    passes.run = slow
    one.runner.in_flight.order(["long/0"])
    long, short = (Request(one.runner, prompt(n)) for n in (60, 10))
    task = long.task(0, 60, want_logits=False)
    task.name = "long/0"
    for _ in one.runner.prefill_batch([task]):
        pass
    assert begun.wait(HANG_S)
    urgent = short.task(0, 10)
    urgent.name = "short/0"
    one.runner.in_flight.order(["short/0", "long/0"])
    boundaries = one.runner.prefill_batch([urgent])
    for boundary in boundaries:
        if boundary.awaited is not None:
            go_on.set()
    assert urgent.logits is not None
    one.check_settled()
    assert steps[0] == "long" and steps[1] == "short"
    assert steps.index("short") + steps.count("short") < len(steps)  # the long one ends later
    assert steps[-1] == "long"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("count", "ranks", "own"), [(3, 1, False), (3, 1, True), (2, 2, True)])
def test_random_orders_preemptions_and_drops_change_nothing(
    five_layers, staged, count, ranks, own
) -> None:
    one = staged(five_layers, count, ranks, num_pages=128, own_pools=own)
    storm(one.runner, 5, seed=random.randrange(1 << 30), lengths=(12, 70))
    one.check_settled()


@pytest.mark.parametrize("at", ["first stage", "handed on", "through"])
def test_a_pass_that_is_given_up_leaves_nothing_anywhere(five_layers, staged, at) -> None:
    one = staged(five_layers, 3)
    request = Request(one.runner, prompt(40), room=1)
    boundaries = one.runner.prefill_batch([request.task(0, 40)])
    for boundary in boundaries:
        if at == "first stage" or boundary.awaited is not None:
            if at == "through":
                assert boundary.awaited.wait(HANG_S)
            break
    boundaries.close()
    one.check_settled()
    wanted = make_runner(five_layers)
    assert torch.equal(prefill(one.runner, request), prefill(wanted, Request(wanted, prompt(40))))
    one.check_settled()


def test_logits_wait_for_the_word_of_every_layer(five_layers, staged) -> None:
    """Rows and reports travel separately: when the logits are there, all layers have been
    reported."""
    one = staged(five_layers, 3)
    held, hear = [], one.answer
    one.answer = held.append
    request, layers = Request(one.runner, prompt(20)), []
    task = request.task(0, 20)
    task.on_layer = layers.append
    for boundary in one.runner.prefill_batch([task]):
        if boundary.awaited is not None:
            assert not boundary.awaited.wait(0.3)
            for answer in held:
                hear(answer)
            assert boundary.awaited.wait(0)
    assert len(layers) == 5 - len(one.runner.model.layers) and task.logits is not None
    one.check_settled()


def test_what_came_back_and_waits_holds_up_no_stage(five_layers, staged) -> None:
    """More passes than there are slots come back, and the first to begin is resumed last."""
    one = staged(five_layers, 2)
    requests = [Request(one.runner, prompt(9, seed=n)) for n in range(12)]
    tasks = [request.task(0, 9) for request in requests]
    passes = [one.runner.prefill_batch([task]) for task in tasks]
    for steps in passes:
        assert next(boundary for boundary in steps if boundary.awaited is not None)
    for steps in reversed(passes):
        assert list(steps) == []
    wanted = make_runner(five_layers)
    for task, n in zip(tasks, range(12), strict=True):
        assert torch.equal(task.logits, prefill(wanted, Request(wanted, prompt(9, seed=n))))
    one.check_settled()


def test_a_stage_that_falls_is_named_to_whoever_waits_and_ever_after(five_layers, staged) -> None:
    one = staged(five_layers, 2)

    def broken(*_: object, **__: object):
        raise RuntimeError("out of luck")

    one.passes[1].run = broken
    request = Request(one.runner, prompt(10))
    heard: list[EngineDied] = []
    one.runner.in_flight.when_died(heard.append)
    with pytest.raises(StageError, match="out of luck"):
        prefill(one.runner, request)
    one.runner.in_flight.when_died(heard.append)
    assert [str(error) for error in heard] == ["RuntimeError: out of luck"] * 2
    with pytest.raises(StageError, match="out of luck"):
        next(one.runner.prefill_batch([request.task(0, 10)]))


@pytest.mark.parametrize("is_known", [True, False])
def test_a_lost_hop_tells_of_the_death_behind_it(five_layers, staged, is_known) -> None:
    """The sender of rows may notice a death before the reader of the stages' answers does."""
    one = staged(five_layers, 2)
    request = Request(one.runner, prompt(40))
    died = StageError("stage 1 died, killed by SIGKILL")

    def lose(number: int, summands: tuple[torch.Tensor, torch.Tensor]) -> None:
        if is_known:
            one.runner.in_flight.fail(died)
        raise TransferError("stages-1 is gone")

    one.rows[0].send = lose
    message = str(died) if is_known else "rows can't be handed on: stages-1 is gone"
    with pytest.raises(StageError, match=message):
        prefill(one.runner, request)


def test_boundaries_name_layers_of_the_whole_model(five_layers, staged) -> None:
    one = staged(five_layers, 2)
    layers: list[int] = []
    task: PrefillTask = Request(one.runner, prompt(5)).task(0, 5)
    task.on_layer = layers.append
    seen = list(one.runner.prefill_batch([task]))
    assert seen[0] == Boundary(-1, "embed") and seen[-1].awaited is not None
    assert [b.layer for b in seen if b.operator == "attn"] == [0, 1]
    assert layers == [2, 3, 4]


@pytest.mark.parametrize(
    ("sizes", "ranks"), [((1, 2, 3), 1), ((2,), 1), ((3, 3), 1), ((1, 2), 2), ((2,), 2)]
)
def test_staged_members_of_a_group_compute_what_one_whole_instance_does(
    five_layers, staged, pairs, sizes, ranks
) -> None:
    """Chunks over growing groups, whose members are chains of different lengths."""
    rng = random.Random(str(sizes))
    tokens = prompt(150, seed=len(sizes))
    wanted = make_runner(five_layers, page_tokens=8, num_pages=128)
    request = Request(wanted, tokens)
    logits = prefill(wanted, request)
    members = [
        staged(five_layers, stages, ranks, page_tokens=8, num_pages=128)
        for stages in ((2, 3, 2) if ranks == 1 else (2,))[: max(sizes)]
    ]
    runners: list[Runner] = [member.runner for member in members]
    if len(runners) < max(sizes):  # and one member without stages
        runners.append(open_runner(pairs(3)[2], five_layers, num_pages=128, page_tokens=8))
    others: list[torch.Tensor] = []

    def between(member: Member, boundary: Boundary) -> None:
        if member is group.members[0] and rng.random() < 0.1:  # left in a ring's step for another
            others.append(prefill(member.runner, Request(member.runner, prompt(20))))

    group = RingGroup(
        runners,
        plan(rng, len(tokens), sizes),
        tokens,
        max_chunk_tokens=32,
        rng=rng,
        between=between,
    )
    torch.testing.assert_close(group.run(), logits, rtol=1e-4, atol=1e-4)
    pages = wanted.pool.storage[:, request.pages].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
    kv = pages[:, :, :, : len(tokens)].float()
    found = torch.cat(list(group.kv()), dim=2)  # the heads of all ranks
    torch.testing.assert_close(found, kv, rtol=1e-4, atol=1e-4)
    alone = prefill(wanted, Request(wanted, prompt(20)))
    for logits in others:
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)
    for member in members:
        member.check_settled()


@pytest.mark.parametrize(
    ("count", "ranks", "own"), [(3, 1, False), (3, 1, True), (2, 2, False), (2, 2, True)]
)
def test_a_staged_owner_spreads_requests_over_workers(staged, count, ranks, own) -> None:
    """Stages of one instance, shards at two others: chunks of any sizes that straddle shards, then
    decodes over a shard's end beside a short sequence. With ranks it is 3D."""
    rng, steps, folder = random.Random(3), 12, split_folder("qwen3-layer-types")
    model = load_model(folder, device="cpu")
    one = staged(folder, count, ranks, page_tokens=8, num_pages=96, own_pools=own)
    prompts = [prompt(61, seed=1), prompt(40, seed=2)]
    wanted = make_runner(folder, page_tokens=8, num_pages=96)
    expected = greedy(wanted, [Request(wanted, p, steps) for p in prompts], steps)
    with world(model, 2, max_rows=9, runner=one.runner) as made:
        requests = [Long(made, prompts[0], (24, 64, 80)), Long(made, prompts[1], (56,))]
        batch = DecodeBatch(one.runner, one.runner.pool, Sampler(), max_batch=4)
        for i, request in enumerate(requests):
            cuts = [0, *random_cuts(rng, len(request.tokens), 3), len(request.tokens)]
            for start, stop in pairwise(cuts):
                task = request.task(start, stop)
                table = page_table_of([task.pages])
                one.runner.mixed(NO_DECODES, table, [task])
            assert task.logits is not None and int(task.logits.argmax()) == expected[i][0]
            batch.add(sequence_of(request, str(i), expected[i][0], steps))
        found: dict[str, list[int]] = {"0": [], "1": []}
        while batch.size:
            for out in batch.step():
                found[out.request_id].append(out.token_id)
    assert found == {str(i): answer[1:] for i, answer in enumerate(expected)}
    one.check_settled()
