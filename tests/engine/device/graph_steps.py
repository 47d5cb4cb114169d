"""Decode steps by CUDA graphs give the tokens of the host's engine, and prefills that may stop
within attention the bits of those that may not, on the fake device with Triton's interpreter.

`test_graph_steps.py` runs this file in a process of its own, because Triton reads TRITON_INTERPRET
when it is imported. The graphs here repeat torch's operators and Triton's kernels over the memory
of their capture; all other memory of a capture is garbage before each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from millrace.core.config import EngineConfig
from millrace.engine.assembly import Engine
from millrace.engine.calibration import calibrate_decode
from millrace.engine.decode_batch import DecodeBatch, Sequence
from millrace.engine.forward.pass_states import StepCounts
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.forward.row_slices import SLICE_FLOPS
from millrace.engine.kv.page_table import PageTable
from millrace.engine.model.operators import ATTN_ROWS
from millrace.engine.sampling.sampler import Sampler
from millrace.engine.sampling.spec import SamplingSpec
from millrace.instance.latency import decode_table
from support.device_engine import TINY, device_engine, new_batch, prefilled, tiles
from support.fake_cuda import fake_cuda

# A capture computes over memory that nobody has written: the router's logits may be no numbers.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")

Script = Callable[[Engine, DecodeBatch], Iterator[None]]


def play(engine: Engine, script: Script) -> dict[str, list[int]]:
    """Returns the tokens of each request, its first token included."""
    batch = new_batch(engine, runs_ahead=engine.device.type == "cuda")
    tokens: dict[str, list[int]] = {}
    events = script(engine, batch)
    next(events)
    while batch.is_due:
        for out in batch.step():
            assert not out.error, out
            tokens.setdefault(out.request_id, []).append(out.token_id)
        batch.check_integrity()
        next(events, None)
    return tokens


def greedy(tokens: int) -> SamplingSpec:
    return SamplingSpec(max_tokens=tokens)


def drawn(tokens: int, **more: float) -> SamplingSpec:
    return SamplingSpec(max_tokens=tokens, temperature=0.9, seed=tokens, **more)


def coming_and_going(engine: Engine, batch: DecodeBatch) -> Iterator[None]:
    """Sequences join, move to other rows and leave; lengths cross pages and attention's cuts."""

    def sequence(name: str, tokens: int, spec: SamplingSpec) -> Sequence:
        return prefilled(engine, name, tokens, spec)

    batch.add(sequence("a", 30, greedy(5)))
    yield
    batch.add(sequence("bb", 1, drawn(4)))
    batch.add(sequence("ccc", 62, drawn(6, top_p=0.9)))
    yield
    paused = batch.pause("a")
    yield
    for one in paused:
        batch.resume(one)
    batch.add(sequence("dddd", 15, SamplingSpec(max_tokens=4, repetition_penalty=1.3)))
    yield
    batch.remove("bb")
    yield


def played_on(
    device: str, family: str, layers: int, script: Script, **settings: object
) -> tuple[dict[str, list[int]], StepCounts]:
    sizes = {**TINY, "num_hidden_layers": layers}
    engine = device_engine(family, device, sizes=sizes, dtype="float32", **settings)
    return play(engine, script), engine.runner.states.steps


@pytest.mark.parametrize(("family", "layers"), [("llama", 2), ("qwen3_moe", 2), ("mistral", 1)])
def test_graphs_give_the_tokens_of_the_host(monkeypatch, family, layers):
    model = (family, layers, coming_and_going)
    wanted, _ = played_on("cpu", *model, attention_backend="reference")
    with tiles(), fake_cuda(monkeypatch):
        found, steps = played_on("cuda:0", *model, cuda_graph_batches="4", max_context_tokens=80)
    assert found == wanted
    assert steps.graph >= 6 and not steps.eager


def test_steps_are_timed_by_the_graphs_that_the_batch_then_uses(monkeypatch):
    sizes = {"cuda_graph_batches": "2", "max_context_tokens": 80}
    with tiles(), fake_cuda(monkeypatch) as device:
        engine = device_engine("llama", "cuda:0", sizes=TINY, dtype="float32", **sizes)
        table = decode_table(engine, EngineConfig(max_batch=2))
        graphs = len(device.graphs)
        timed = calibrate_decode(engine, 2, table)
        batch = DecodeBatch(
            engine.runner, engine.pool, Sampler(), max_batch=2, runs_ahead=True, page_table=table
        )
        batch.add(prefilled(engine, "a", 30, greedy(3)))
        while batch.is_due:
            batch.step()
    assert {size for size, _, _ in timed} == {1, 2}
    assert not engine.runner.states.steps.eager
    assert engine.runner.states.steps.graph >= 2 * len(timed) + 2
    assert len(device.graphs) == graphs > 0


def test_what_fits_no_graph_runs_without(monkeypatch):
    def three(engine: Engine, batch: DecodeBatch) -> Iterator[None]:
        batch.add(prefilled(engine, "a", 14, greedy(4)))
        batch.add(prefilled(engine, "bb", 3, greedy(2)))
        batch.add(prefilled(engine, "ccc", 1, greedy(2)))
        yield

    model = ("llama", 1, three)
    wanted, _ = played_on("cpu", *model, attention_backend="reference")
    with tiles(), fake_cuda(monkeypatch):
        found, steps = played_on("cuda:0", *model, cuda_graph_batches="1")
    assert found == wanted
    assert steps.eager == {"batch": 1} and steps.graph == 2


def test_a_prefill_that_may_stop_within_attention_computes_the_same(monkeypatch):
    ids = torch.arange(170) % TINY["vocab_size"]

    def prefill(slice_flops: float) -> tuple[list[list[str]], torch.Tensor]:
        engine = device_engine("llama", "cuda:0", sizes=TINY, dtype="float32", cuda_graphs="off")
        engine.runner.states.slice_flops = slice_flops
        pages = engine.pool.allocate(engine.layout.pages_for(len(ids)))
        names, logits = [], []
        for start, stop in ((0, 30), (30, len(ids))):
            task = PrefillTask(token_ids=ids[start:stop], history_tokens=start, pages=pages)
            with torch.inference_mode():
                names.append([b.operator for b in engine.runner.prefill_batch([task])])
            assert task.logits is not None
            logits.append(task.logits)
        return names, torch.stack(logits).cpu()

    with tiles(), fake_cuda(monkeypatch):
        names, wanted = prefill(SLICE_FLOPS)
        cut, found = prefill(4.0 * 2 * 16 * 140 * 100 / 2.5)
    assert not any(ATTN_ROWS in one for one in names)
    assert cut[0] == names[0]
    first = cut[1].index(ATTN_ROWS)
    assert cut[1][first - 1 : first + 2] == ["qkv_proj", ATTN_ROWS, "attn"]
    assert [name for name in cut[1] if name != ATTN_ROWS] == names[1]
    # The last slice has few rows, for which the kernel has another tile.
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_a_capture_leaves_all_kv_as_it_was(monkeypatch):
    with tiles(), fake_cuda(monkeypatch):
        engine = device_engine(
            "llama", "cuda:0", sizes=TINY, dtype="float32", cuda_graph_batches="1,3"
        )
        with torch.inference_mode():
            engine.pool.storage.fill_(1.0)
            engine.runner.follow(PageTable(3, engine.device))
            assert bool((engine.pool.storage == 1.0).all())
