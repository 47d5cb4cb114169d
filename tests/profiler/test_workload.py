"""The timed passes are the passes of a live instance."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.engine.assembly import Engine, open_engine
from millrace.profiler.measure import Decode, Mixed, Prefill, measure
from millrace.profiler.workload import OperatorClock, Workload
from support.deadlines import HANG_S
from support.tiny_models import model_folder

CHUNK = 64
OPERATORS = {
    *("embed", "qkv_proj", "attn", "o_proj", "gate_up_proj", "down_proj", "lm_head", "sample"),
}


def open_tiny(family: str = "llama") -> Engine:
    config = EngineConfig(device="cpu", dtype="float32", threads=1, kv_bytes=4 << 20)
    return open_engine(model_folder(family), config)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = open_tiny()
    yield engine
    engine.pool.check_integrity(expected_used=0)


def load(engine: Engine, max_tokens: int = 400) -> Workload:
    return Workload(engine, max_chunk_tokens=CHUNK, max_batch=8, max_tokens=max_tokens)


def test_a_long_prompt_goes_in_equal_passes_and_only_the_last_has_logits(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    prefill_batch = engine.runner.prefill_batch

    def spy(tasks):
        seen.append([(len(t.token_ids), t.history_tokens, t.want_logits) for t in tasks])
        return prefill_batch(tasks)

    monkeypatch.setattr(engine.runner, "prefill_batch", spy)
    workload = load(engine)
    timing = workload.prefill(100, 30)
    together = workload.prefill(70, 0, 3)
    workload.close()

    assert seen[:2] == [[(50, 30, False)], [(50, 80, True)]]
    assert seen[2] == [(70, 0, True)] * 3  # in one pass, each with its own pages
    assert (timing.passes, together.passes) == (2, 1)
    assert timing.operators.keys() == OPERATORS
    # What lies between operators is not theirs, and a busy machine adds to it.
    assert 0 < sum(timing.operators.values()) <= 1.2 * timing.seconds


def test_the_operators_of_experts_stand_where_the_tables_have_them() -> None:
    engine = open_tiny("qwen3-moe")
    workload = load(engine)
    assert workload.prefill(20).operators.keys() == OPERATORS
    workload.close()


def test_decode_steps_have_pages_of_their_own_or_no_room(engine: Engine) -> None:
    workload = load(engine)
    assert workload.has_room(8, 64)
    assert workload.decode_step_s(8, 64) > 0.0
    assert not workload.has_room(8, workload.kv_tokens // 8 + 1)
    workload.close()


def test_a_mixed_pass_has_pages_of_its_own_for_each_of_its_sequences(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    mixed = engine.runner.mixed

    def spy(decodes, page_table, tasks):
        pages = [row[row > 0].tolist() for row in page_table]
        seen.append((decodes.kv_lens.tolist(), [t.kv_tokens for t in tasks], pages))
        return mixed(decodes, page_table, tasks)

    monkeypatch.setattr(engine.runner, "mixed", spy)
    workload = load(engine)
    assert workload.mixed_s([(30, 70), (9, 0)], [50, 1]) > 0.0
    assert workload.mixed_s([(30, 70)], []) > 0.0
    rows = workload.decode_rows(4, 90)
    workload.close()

    (kv_lens, chunks, pages), alone = seen
    assert alone[:2] == ([], [100])
    assert (kv_lens, chunks) == ([50, 1], [100, 9])
    held = [page for row in pages for page in row]
    assert len(held) == len(set(held))
    assert rows.operators.keys() == OPERATORS
    assert sum(rows.operators.values()) == pytest.approx(rows.seconds, rel=0.2)


@pytest.mark.parametrize("tokens", [-1, 4096, 1 << 20])
def test_more_than_the_model_holds_is_refused(engine: Engine, tokens: int) -> None:
    with pytest.raises(ConfigError, match=rf"max_tokens is {tokens}; it must be 1 to \d+"):
        load(engine, tokens)


def test_a_budget_covers_lengths_histories_batches_and_steps(engine: Engine) -> None:
    workload, shares = load(engine), []
    measured = measure(workload, HANG_S, shares.append)  # the rounds end before it does
    workload.close()

    assert measured.longest <= 400
    cases = set(measured.prefills)
    fitted = cases - measured.held_out
    assert {case.tokens for case in fitted} >= {16, 24, 32, measured.longest}
    assert any(case.batch > 1 for case in fitted)
    assert {step.batch for step in measured.decode_s} >= {1, 2, 4, 8}
    assert max(step.batch for step in measured.decode_s) <= 8
    assert any(isinstance(case, Prefill) for case in measured.held_out)
    assert any(isinstance(case, Decode) for case in measured.held_out)
    prompts = set(measured.prompts)
    assert all(c.batch > 1 or c.tokens + c.history <= measured.longest for c in prompts)
    assert {row.batch for row in measured.rows} == {1, 4}  # no more than an instance's batch
    assert {case for case in measured.held_out if isinstance(case, Mixed)} == set(measured.mixed_s)
    assert measured.mixed_s
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_no_budget_is_too_small_for_a_first_round(engine: Engine) -> None:
    workload = load(engine, max_tokens=1)
    measured = measure(workload, 1e-6)
    workload.close()
    assert measured.longest == 1
    assert measured.rounds == 1


def test_operators_of_one_graph_divide_their_time_by_their_weights():
    clock = OperatorClock(torch.device("cpu"), {"o_proj": 1, "gate_up_proj": 3, "qkv_proj": 2})
    clock.ended("embed")
    clock.ended("qkv_proj")
    clock.ended("attn")
    clock.ended("o_proj", "gate_up_proj")
    found = clock.read(1).operators
    assert found.keys() == {"embed", "qkv_proj", "attn", "o_proj", "gate_up_proj"}
    assert found["gate_up_proj"] == pytest.approx(3 * found["o_proj"])
    assert sum(found.values()) <= clock.read(1).seconds
