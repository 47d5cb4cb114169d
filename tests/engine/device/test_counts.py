"""How often the engine's CUDA paths launch, copy and wait, on a device that counts.

The kernels compute nothing here; `test_graph_steps.py` has their results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="triton (extra `gpu`) isn't installed")

from millrace.core.errors import ConfigError
from millrace.engine.assembly import Engine
from millrace.engine.forward.pass_states import StepCounts
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.sampling.spec import SamplingSpec
from support.device_engine import TINY, capture, device_engine, new_batch, prefilled
from support.fake_cuda import FakeCuda, fake_cuda

LAYERS = 2
GREEDY = SamplingSpec(max_tokens=100)
NUCLEUS = SamplingSpec(max_tokens=100, temperature=0.8, top_p=0.9)

MOST_OF_LAYER = {"llama": 9, "qwen3_moe": 28}
"""Launches of a layer: norms, products, rotation with the K/V write, attention, activation. Those
of a mixture sort its tokens by expert."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_cuda(monkeypatch) as device:
        yield device


@pytest.mark.parametrize("family", MOST_OF_LAYER)
def test_a_prefill_waits_for_nothing_between_its_first_operator_and_its_last(cuda, family):
    engine = device_engine(family, "cuda:0", sizes=TINY, dtype="bfloat16")
    task = PrefillTask(token_ids=torch.arange(40), history_tokens=0, pages=engine.pool.allocate(3))
    most = {"experts": 20, "gate": 7}
    with torch.inference_mode(), cuda.counted() as counts:
        before = 10  # the pass's tables, and its angles
        for boundary in engine.runner.prefill_batch([task]):
            assert counts.launches - before <= most.get(boundary.operator, 4), boundary
            before = counts.launches
    assert not counts.syncs
    assert counts.copies <= 3 and not counts.by_name["wait event"]


def short_prefill(engine: Engine, **wanted: bool) -> PrefillTask:
    pages = engine.pool.allocate(3)
    return PrefillTask(token_ids=torch.arange(40), history_tokens=0, pages=pages, **wanted)


@pytest.mark.parametrize("family", MOST_OF_LAYER)
def test_a_layer_of_a_short_prefill_is_a_graph_and_its_attention(cuda, family):
    layers = 4
    engine = device_engine(
        family, "cuda:0", sizes={**TINY, "num_hidden_layers": layers}, cuda_graph_rows="16,64"
    )
    capture(engine)
    steps = []
    with torch.inference_mode(), cuda.counted() as counts:
        before = 0, 0
        for boundary in engine.runner.prefill_batch([short_prefill(engine)]):
            now = counts.launches, counts.replays
            steps.append((boundary.operator, now[0] - before[0], now[1] - before[1]))
            before = now
    ends = "experts" if family == "qwen3_moe" else "down_proj"
    last = layers - 1
    names, launches, replays = zip(*steps[: 2 * layers + 1], strict=True)
    assert names == ("embed", "qkv_proj", *("attn", ends) * last, "attn")
    assert replays == (0, 1, *(0, 1) * last, 0)
    assert launches[1] <= 5  # the pass takes the memory
    # Attention's one kernel, and the last layer's choice of rows before it.
    assert launches[2:] == (1, 0) * last + (3,)
    # The pass's tables, angles and memory; the last layer after its attention, and lm_head.
    assert counts.launches <= layers + 11 + MOST_OF_LAYER[family] and counts.replays == layers
    assert not counts.syncs and counts.copies <= 3
    assert engine.runner.states.prefills == StepCounts(graph=1)


def test_what_fits_no_graph_is_counted_by_its_reason(cuda):
    engine = device_engine("llama", "cuda:0", sizes=TINY, cuda_graph_rows="16")
    counts = engine.runner.states.prefills

    def run() -> None:
        with torch.inference_mode():
            list(engine.runner.prefill_batch([short_prefill(engine)]))

    run()
    assert counts.eager == {"off": 1}  # not captured yet
    capture(engine)
    run()
    assert counts == StepCounts(graph=0, eager=Counter({"off": 1, "rows": 1}))


def fails_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Lets the capture of this number fail."""
    graph, left = torch.cuda.graph, [number]

    def failing(*args: object, **options: object) -> object:
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError("no memory for a graph")
        return graph(*args, **options)

    monkeypatch.setattr(torch.cuda, "graph", failing)


def test_a_failed_capture_leaves_decode_without_graphs(cuda, monkeypatch, caplog):
    engine = device_engine("llama", "cuda:0", sizes=TINY, cuda_graph_batches="1,2")
    fails_at(monkeypatch, 2)
    batch = new_batch(engine, runs_ahead=True)
    (said,) = caplog.messages
    assert said == "decode runs without CUDA graphs: their capture failed: no memory for a graph"
    batch.add(prefilled(engine, "a", 5, SamplingSpec(max_tokens=3)))
    tokens = [out.token_id for _ in range(3) for out in batch.step()]
    assert len(tokens) == 2
    assert engine.runner.states.steps.eager["failed"] >= 2


def test_a_failed_capture_ends_a_start_that_requires_graphs(cuda, monkeypatch):
    engine = device_engine("llama", "cuda:0", sizes=TINY, cuda_graphs="on")
    fails_at(monkeypatch, 1)
    with pytest.raises(ConfigError, match="'on', but the capture of decode steps failed: no mem"):
        new_batch(engine, runs_ahead=True)


def test_a_failed_capture_leaves_passes_without_graphs(cuda, monkeypatch, caplog):
    engine = device_engine("llama", "cuda:0", sizes=TINY, cuda_graph_rows="16,64")
    fails_at(monkeypatch, 3)
    capture(engine)
    (said,) = caplog.messages
    assert said.endswith("their capture failed: no memory for a graph")
    task = short_prefill(engine)
    with torch.inference_mode():
        names = [boundary.operator for boundary in engine.runner.prefill_batch([task])]
    assert names[:4] == ["embed", "qkv_proj", "attn", "o_proj"] and task.logits is not None
    assert engine.runner.states.prefills == StepCounts(eager=Counter({"failed": 1}))


def test_a_pass_of_answers_and_a_chunk_waits_once_for_the_answers_tokens(cuda):
    engine = device_engine("llama", "cuda:0", sizes=TINY, dtype="bfloat16")
    batch = new_batch(engine)
    for i in range(2):
        batch.add(prefilled(engine, str(i), 14 + i, GREEDY))
    pages = engine.pool.allocate(2)
    for start in (0, 9):
        task = PrefillTask(
            token_ids=torch.arange(9), history_tokens=start, pages=pages, want_logits=False
        )
        with torch.inference_mode(), cuda.counted() as counts:
            batch.page_table.put(2, pages)
            logits = engine.runner.mixed(batch.rows(), batch.page_table.first(3), [task])
            assert len(batch.take(logits)) == 2
        assert not counts.syncs
        assert counts.by_name["wait event"] == 1
        # Rows of answers and of chunks are attended to by kernels of their own.
        assert counts.launches <= LAYERS * (MOST_OF_LAYER["llama"] + 1) + 13


@pytest.mark.parametrize("spec", [GREEDY, NUCLEUS], ids=["greedy", "nucleus"])
@pytest.mark.parametrize("family", MOST_OF_LAYER)
def test_a_step_without_a_graph_waits_once_for_its_tokens(cuda, family, spec):
    engine = device_engine(family, "cuda:0", sizes=TINY, dtype="bfloat16", cuda_graphs="off")
    batch = new_batch(engine)
    for i in range(3):
        batch.add(prefilled(engine, str(i), 14 + i, spec))
    batch.step()
    for _ in range(4):  # the lengths pass the end of a page
        with cuda.counted() as counts:
            assert len(batch.step()) == 3
        assert not counts.syncs
        assert counts.by_name["wait event"] == 1
        assert counts.launches <= LAYERS * MOST_OF_LAYER[family] + (26 if spec is NUCLEUS else 11)
        assert counts.copies <= 6
    assert engine.runner.states.steps.eager == {"off": 5}


@pytest.mark.parametrize(
    ("spec", "launches"), [(GREEDY, 3), (NUCLEUS, 18)], ids=["greedy", "nucleus"]
)
@pytest.mark.parametrize("family", MOST_OF_LAYER)
def test_a_step_is_one_graph_and_a_choice(cuda, family, spec, launches):
    engine = device_engine(family, "cuda:0", sizes=TINY, dtype="bfloat16", cuda_graph_batches="4")
    batch = new_batch(engine)
    for i in range(3):
        batch.add(prefilled(engine, str(i), 14 + i, spec))
    batch.step()
    for _ in range(4):
        with cuda.counted() as counts:
            assert len(batch.step()) == 3
        assert not counts.syncs
        assert (counts.replays, counts.by_name["wait event"]) == (1, 1)
        assert counts.launches <= launches  # two of a page table's changes
        assert counts.copies <= 5
    assert (engine.runner.states.steps.graph, engine.runner.states.steps.eager) == (5, {})


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("spec", [GREEDY, NUCLEUS], ids=["greedy", "nucleus"])
def test_the_next_step_is_enqueued_before_the_host_waits(cuda, spec, graphs):
    engine = device_engine("llama", "cuda:0", sizes=TINY, dtype="bfloat16", cuda_graphs=graphs)
    batch = new_batch(engine, runs_ahead=True)
    for i in range(3):
        batch.add(prefilled(engine, str(i), 14 + i, spec))
    batch.step()
    for number in range(4):
        if number == 2:
            batch.add(prefilled(engine, "late", 9, spec))
        with cuda.counted() as counts:
            assert len(batch.step()) == 3 + (number == 3)
        assert not counts.syncs
        (behind,) = counts.behind
        assert behind > counts.replays
        assert counts.replays == (graphs == "auto")
        assert counts.copies <= 8


def test_edited_logits_and_log_probabilities_only_add_waits_for_their_own_results(cuda):
    engine = device_engine("llama", "cuda:0", sizes=TINY, dtype="bfloat16")
    batch = new_batch(engine, runs_ahead=True)
    spec = SamplingSpec(
        max_tokens=100,
        repetition_penalty=1.2,
        frequency_penalty=0.1,
        logit_bias={3: 1.0},
        min_tokens=90,
        stop_token_ids=(5,),
        logprobs=0,
    )
    batch.add(prefilled(engine, "edited", 14, spec))
    batch.add(prefilled(engine, "plain", 15, GREEDY))
    batch.step()
    with cuda.counted() as counts:
        assert len(batch.step()) == 2
    assert not counts.syncs
    assert counts.by_name["wait event"] == 3  # tokens, edited rows' tokens, log probabilities


def test_the_number_of_a_steps_calls_does_not_grow_with_the_layers(cuda):
    found = []
    for layers in (2, 5):
        engine = device_engine(
            "llama",
            "cuda:0",
            sizes={**TINY, "num_hidden_layers": layers},
            cuda_graph_batches="1",
        )
        batch = new_batch(engine)
        batch.add(prefilled(engine, "a", 5, GREEDY))
        with cuda.counted() as counts:
            batch.step()
        found.append((counts.launches, counts.copies, counts.allocations))
    assert found[0] == found[1]


def test_the_device_counts_what_makes_the_host_wait(cuda):
    there = torch.arange(4.0, device="cuda")
    waits = {
        "item": lambda: there.sum().item(),
        "bool": lambda: bool(there.any()),
        "list": lambda: there.tolist(),
        "numpy": lambda: there.numpy(force=True),
        "nonzero": lambda: there.nonzero(),
        "mask": lambda: there[there > 1],
        "to the host": lambda: there.cpu(),
        "from pageable memory": lambda: torch.zeros(3).to("cuda", non_blocking=True),
        "blocking": lambda: torch.zeros(3, pin_memory=True).to("cuda"),
        "synchronize": lambda: torch.cuda.synchronize(),
    }
    for name, wait in waits.items():
        with cuda.counted() as counts:
            wait()
        assert len(counts.syncs) == 1, name
    with cuda.counted() as counts:
        torch.zeros(3, pin_memory=True).to("cuda", non_blocking=True).add_(1).mul(2)
    assert (counts.syncs, counts.launches, counts.copies) == ([], 2, 1)


def test_a_copy_to_the_host_arrives_with_its_event(cuda):
    here = torch.zeros(3, pin_memory=True)
    here.copy_(torch.ones(3, device="cuda"), non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream())
    assert here.tolist() == [0, 0, 0]
    event.synchronize()
    assert here.tolist() == [1, 1, 1]


def test_a_graph_may_not_read_memory_without_an_owner(cuda):
    kept, lost, graph = torch.ones(2, device="cuda"), torch.ones(2, device="cuda"), None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kept + lost
    kept += 1
    graph.replay()
    assert out.tolist() == [3, 3]
    del lost
    with pytest.raises(AssertionError, match="no owner"):
        graph.replay()


def test_a_graph_may_not_wait_or_copy(cuda):
    there = torch.ones(2, device="cuda")
    for wrong in (lambda: there.tolist(), lambda: torch.ones(2).to("cuda")):
        with pytest.raises(AssertionError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            wrong()
