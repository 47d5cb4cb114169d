"""Short prefills by CUDA graphs give the bits of eager passes of as many rows, wherever they are
suspended, on the fake device with Triton's interpreter.

`test_graph_steps.py` runs this file in a process of its own, because Triton reads
TRITON_INTERPRET when it is imported. What only a graph uses is garbage before each replay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from millrace.engine.assembly import Engine
from millrace.engine.forward.mixed_pass import DecodeRows
from millrace.engine.forward.pass_states import StepCounts
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.kv.step_tables import page_table_of
from millrace.engine.model.operators import ATTN_ROWS
from support.device_engine import TINY, capture, device_engine, tiles
from support.fake_cuda import fake_cuda

# A capture computes over memory that nobody has written: the router's logits may be no numbers.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")

FAMILIES = [("llama", 2), ("qwen3_moe", 2), ("mistral", 2)]


@dataclass
class Result:
    """What a pass has computed: logits or hidden states, and its K/V."""

    rows: torch.Tensor
    kv: torch.Tensor
    boundaries: list[str]

    def assert_same(self, other: Result) -> None:
        assert torch.equal(self.rows, other.rows)
        assert torch.equal(self.kv, other.kv)


class Prompt:
    """A prompt in pages of its own, whose first `history` tokens have any K/V."""

    def __init__(self, engine: Engine, seed: int, history: int = 0) -> None:
        self.engine = engine
        self.ids = (torch.arange(200) * 7 + seed) % TINY["vocab_size"]
        self.pages = engine.pool.allocate(engine.layout.pages_for(200))
        self.history = history
        shape = self.storage[:, self.pages].shape
        self._first = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        self.forget()

    @property
    def storage(self) -> torch.Tensor:
        """The pool's numbers, beside the device."""
        return self.engine.pool.storage.host

    def forget(self) -> None:
        """Makes the pages what they were before any pass."""
        self.storage[:, self.pages] = self._first

    def task(self, start: int, stop: int, **wanted: bool) -> PrefillTask:
        return PrefillTask(
            token_ids=self.ids[start:stop], history_tokens=start, pages=self.pages, **wanted
        )


def computed(
    prompt: Prompt,
    rows: int,
    *,
    beside: Sequence[PrefillTask] = (),
    stop: int = -1,
    between: Callable[[], object] = lambda: None,
    hidden: bool = False,
) -> Result:
    """Computes `rows` rows of a prompt, in a pass with the tasks `beside` it, and calls `between`
    at the boundary of number `stop`."""
    prompt.forget()
    task = prompt.task(prompt.history, prompt.history + rows, want_hidden=hidden)
    names = []
    with torch.inference_mode():
        for number, boundary in enumerate(prompt.engine.runner.prefill_batch([task, *beside])):
            names.append(boundary.operator)
            if number == stop:
                between()
    found = task.hidden if hidden else task.logits
    assert found is not None
    return Result(found.cpu(), prompt.storage[:, prompt.pages].clone(), names)


def engine_of(family: str, layers: int, rows: str = "16,48", **settings: object) -> Engine:
    return device_engine(
        family,
        "cuda:0",
        sizes={**TINY, "num_hidden_layers": layers},
        dtype="float32",
        cuda_graph_rows=rows,
        **settings,
    )


@pytest.mark.parametrize(("family", "layers"), FAMILIES)
def test_graphs_give_the_bits_of_an_eager_pass_of_their_rows(monkeypatch, family, layers):
    with tiles(), fake_cuda(monkeypatch):
        engine = engine_of(family, layers)

        def all_rows() -> list[Result]:
            """Computes passes of 16 rows, of 11 rows that 5 rows of another prompt make 16, of 40
            of 48 rows over a history; and two of them by graphs without company."""
            found = [computed(Prompt(engine, 1), 16)]
            for seed, rows, whole, history in ((2, 11, 16, 0), (3, 40, 48, 21)):
                other = Prompt(engine, 50)
                company = [other.task(0, whole - rows, want_logits=False)]
                is_graph = bool(engine.runner.states.prefills.graph)
                prompt = Prompt(engine, seed, history)
                found.append(computed(prompt, rows, beside=() if is_graph else company))
            return found

        wanted = all_rows()
        capture(engine)
        before = engine.runner.states.prefills.graph
        found = all_rows()
    assert before == 0
    assert engine.runner.states.prefills == StepCounts(graph=3, eager=Counter({"off": 3}))
    for one, other in zip(found, wanted, strict=True):
        one.assert_same(other)
        assert len(one.boundaries) == 1 + 2 * layers + 4


@pytest.mark.parametrize("hidden", [False, True], ids=["logits", "hidden"])
def test_a_pass_that_is_suspended_anywhere_has_the_same_bits(monkeypatch, hidden):
    with tiles(), fake_cuda(monkeypatch):
        engine = engine_of("llama", 2, rows="16,80")
        capture(engine)
        engine.runner.states.slice_flops = 4.0 * 2 * 16 * 70 * 70  # two slices of 80 rows
        long, short = Prompt(engine, 1, 30), Prompt(engine, 2)
        wanted = computed(long, 80, hidden=hidden)
        assert ATTN_ROWS in wanted.boundaries
        for stop in range(len(wanted.boundaries)):
            found = computed(long, 80, stop=stop, between=lambda: computed(short, 9), hidden=hidden)
            found.assert_same(wanted)
    assert not engine.runner.states.prefills.eager


def test_passes_take_turns_and_one_ends_early(monkeypatch):
    with tiles(), fake_cuda(monkeypatch):
        engine = engine_of("llama", 2, rows="16")
        capture(engine)
        prompts = [Prompt(engine, seed) for seed in range(3)]
        # The passes with more rows come first: their slots are padding's afterwards.
        wanted = [computed(prompts[seed], 9 + seed) for seed in (2, 1, 0)][::-1]
        for one, prompt in zip(wanted, prompts, strict=True):
            assert torch.equal(prompt.storage[:, prompt.pages], one.kv)
        tasks = [prompt.task(0, 9 + seed) for seed, prompt in enumerate(prompts)]
        with torch.inference_mode():
            passes = [engine.runner.prefill_batch([task]) for task in tasks]
            for number in range(len(wanted[0].boundaries)):
                for index, one in enumerate(passes):
                    if index == 1 and number == 4:
                        one.close()
                    elif index != 1 or number < 4:
                        next(one)
        for index in (0, 2):
            logits, prompt = tasks[index].logits, prompts[index]
            assert logits is not None
            found = Result(logits.cpu(), prompt.storage[:, prompt.pages], [])
            found.assert_same(wanted[index])


def test_answers_beside_a_chunk_have_the_bits_of_an_eager_pass(monkeypatch):
    def mixed(engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
        answer, prompt = Prompt(engine, 1, 20), Prompt(engine, 2)
        task = prompt.task(0, 15)
        rows = DecodeRows(
            token_ids=torch.tensor([3]),
            positions=torch.tensor([20]),
            kv_lens=torch.tensor([21], dtype=torch.int32),
        )
        with torch.inference_mode():
            table = page_table_of([answer.pages, prompt.pages])
            logits = engine.runner.mixed(rows, table, [task])
        assert task.logits is not None
        return logits.cpu(), task.logits.cpu()

    with tiles(), fake_cuda(monkeypatch):
        engine = engine_of("llama", 1, rows="16")
        wanted = mixed(engine)
        capture(engine)
        found = mixed(engine)
    assert engine.runner.states.prefills == StepCounts(graph=1, eager=Counter({"off": 1}))
    assert all(map(torch.equal, found, wanted))


def test_a_capture_leaves_all_kv_as_it_was(monkeypatch):
    with tiles(), fake_cuda(monkeypatch):
        engine = engine_of("llama", 1, rows="3,16")
        engine.pool.storage.fill_(1.0)
        capture(engine)
        assert bool((engine.pool.storage == 1.0).all())
