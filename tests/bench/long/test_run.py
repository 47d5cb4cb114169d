"""`millrace bench long`: its figures, its report, and a whole run on few tokens."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from millrace.bench.long import command as long
from millrace.bench.long import kvp as long_kvp
from millrace.bench.long import mixed as long_mixed
from millrace.bench.long import report as long_report
from millrace.bench.long import run as long_run
from millrace.bench.long.kvp import PassTime
from millrace.core.cost.operators import BatchShape
from millrace.profiles import load_profile

MODEL = load_profile("llama3-8b-a100-tp1").operators
FEW = replace(
    long_run.Settings(),
    threads=1,
    prompt_tokens=512,
    profile_s=0.2,
    batches=4,
    rounds=1,
    most_decodes=3,
    static=(64, 256),
    decodes=2,
    context_tokens=32,
    short_decodes=4,
    short_context_tokens=32,
    chunk_tokens=64,
    histories=2,
    batching_rounds=1,
    degrees=(1, 2),
    contexts=(256,),
    token_repeats=2,
    most_tokens=128,
    growth_steps=2,
    growth_chunk_tokens=8,
    growth_repeats=1,
    stages=(1, 2),
    stage_prompt_tokens=96,
    stage_chunk_tokens=32,
    stage_repeats=1,
)


def announce(what: str) -> None:
    pass


class Engine:
    """A `Workload` that takes the model's time, times a factor."""

    max_chunk_tokens = 2048

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def has_room_for(self, lengths: Any) -> bool:
        return sum(lengths) < 100_000

    def mixed_s(self, chunks: Any, contexts: Any) -> float:
        shape = BatchShape(
            prefills=tuple(chunks), decodes=len(contexts), decode_context_tokens=sum(contexts)
        )
        return self.factor * MODEL.pass_s(shape)


def test_random_batches_are_the_same_again_and_of_all_sizes() -> None:
    sizes = {"most_tokens": 1024, "most_history": 16_384, "most_decodes": 32}
    batches = long_mixed.random_batches(200, **sizes)
    assert batches == long_mixed.random_batches(200, **sizes)
    chunks = [chunk for batch in batches for chunk in batch.chunks]
    assert 0.2 < sum(not history for _, history in chunks) / len(chunks) < 0.4
    assert min(tokens for tokens, _ in chunks) < 32 and max(tokens for tokens, _ in chunks) > 700
    assert max(history for _, history in chunks) > 10_000
    assert {len(batch.contexts) for batch in batches} >= {0, 8, 16, 32}


def test_the_predictor_is_off_by_what_the_engine_takes_more() -> None:
    batches = long_mixed.random_batches(
        30, most_tokens=512, most_history=4096, most_decodes=8, seed=1
    )
    measured = type("Measured", (), {"spent_s": 1.0})()
    found = long_mixed.predictor(Engine(1.25), MODEL, measured, batches, 2, announce)  # type: ignore[arg-type]
    assert found["median_error"] == pytest.approx(0.2)
    assert found["p90_error"] == pytest.approx(0.2)
    assert found["spread"] == 0.0
    assert found["corrected_median_error"] < 0.1  # it learns


def test_adaptive_chunks_keep_iterations_level_and_static_ones_do_not() -> None:
    found = long_mixed.chunking(
        Engine(),  # type: ignore[arg-type]
        MODEL,
        prompt_tokens=1 << 19,
        static=(128, 2048),
        contexts=(512,) * 8,
        announce=announce,
    )
    adaptive, small, large = found["ways"].values()
    last = BatchShape(prefills=((128, (1 << 19) - 128),), decodes=8, decode_context_tokens=8 * 512)
    assert adaptive["t_target_s"] == small["t_target_s"] == pytest.approx(MODEL.pass_s(last))
    assert adaptive["p99_over_target"] < 1.02 and adaptive["growth"] < 1.3
    assert small["growth"] > 1.5 and small["over_adaptive"] > 1.02
    assert large["p99_s"] > 3.0 * adaptive["p99_s"] and "over_adaptive" not in large
    assert all(len(way["points"]) < 2 * long_mixed.POINTS for way in found["ways"].values())


def test_a_target_below_what_decodes_alone_are_predicted_to_take() -> None:
    found = long_mixed.chunking(
        Engine(0.5),  # type: ignore[arg-type]
        MODEL,
        prompt_tokens=32 * long_mixed.POINTS,
        static=(64,),
        contexts=(16_384,) * 32,
        announce=announce,
    )
    adaptive = found["ways"]["adaptive 64"]
    assert adaptive["t_target_s"] < MODEL.pass_s(
        long_mixed.Batch(chunks=(), contexts=(16_384,) * 32).shape
    )
    chunks = [tokens for _, tokens, _ in adaptive["points"]]
    assert chunks == [32] * long_mixed.POINTS


def test_decodes_beside_a_chunk_are_compared_with_the_chunk_alone() -> None:
    found = long_mixed.batching(
        Engine(),  # type: ignore[arg-type]
        chunk_tokens=512,
        histories=long_mixed.histories_of(8192, 512, 3),
        contexts=(256,) * 32,
        rounds=3,
        announce=announce,
    )
    assert [row["history"] for row in found["rows"]] == [0, 3840, 7680]
    assert found["whole"]["same_chunk"] > 1.0
    assert found["whole"]["same_tokens"] < found["whole"]["same_chunk"]


class KvOwner:
    """A `KvOwner` of `bench/long/kvp.py`: 1 ms per thousand tokens of the largest shard, 2 ms
    besides, 0.5 ms of work per KVP worker, and twice that to wait for it.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], int]] = []

    def passes(self, ends: Any, tokens: int, context: int, repeats: int, warm: int = 1) -> PassTime:
        self.asked.append((tuple(ends), context))
        spans = [min(end, context) - start for start, end in zip([0, *ends], ends, strict=False)]
        attention_s, work_s = 1e-6 * max(spans), 5e-4 * (len(ends) - 1)
        return PassTime(
            wall_s=attention_s + 3 * work_s + 2e-3,
            wait_s=2 * work_s,
            operators_s=attention_s + work_s,
            attention_s=attention_s,
            rest_s=2e-3,
        )

    def recorded_s(self, context: int, repeats: int) -> float:
        return 1e-6 * context + 1e-3


def test_shards_divide_attention_and_cost_communication() -> None:
    rows = long_kvp.token_times(KvOwner(), [40_000], [1, 2, 4], 3, announce)  # type: ignore[arg-type]
    one, two, four = rows
    assert one["communication_s"] == 0.0 and one["recorded_s"] == pytest.approx(0.041)
    assert (two["attention_s"], four["attention_s"]) == pytest.approx((0.02, 0.01))
    # The work for three KVP workers, and the wait for one that has a core.
    assert four["communication_s"] == pytest.approx(15e-4 + 1e-3, rel=0.02)
    assert four["normalised_s"] == pytest.approx(0.01 + 25e-4 + 2e-3, rel=0.01)


def test_workers_join_as_the_context_grows() -> None:
    owner = KvOwner()
    contexts = [5000, 10_000, 15_000, 20_000, 40_000]
    rows = long_kvp.growth(owner, contexts, 10_000, 32, 3, announce)  # type: ignore[arg-type]
    assert [row["workers"] for row in rows] == [1, 1, 2, 2, 4]
    assert [row["attention_s"] for row in rows] == pytest.approx([0.005, *[0.01] * 4])
    assert rows[-1]["alone_s"] == pytest.approx(0.042)
    assert ((10_000, 20_000, 30_000, 40_000), 40_000) in owner.asked


def document(tmp_path: Path, *parts: str) -> Any:
    found = asyncio.run(long_run.run(replace(FEW, parts=parts)))
    console = Console(file=io.StringIO(), width=100)
    long_report.print_tables(found, console)
    long_report.draw(found, tmp_path / "long.png")
    assert (tmp_path / "long.png").stat().st_size > 1000
    return json.loads(json.dumps(found)), console.file.getvalue()  # type: ignore[attr-defined]


def test_mixed_batches_of_an_engine_from_end_to_end(tmp_path: Path) -> None:
    found, said = document(tmp_path, *long_run.MIXED_PARTS)
    assert found["benchmark"] == "long" and 1 <= found["predictor"]["batches"] <= 4
    assert set(found["chunking"]["ways"]) == {
        "adaptive 64",
        "static 64",
        "adaptive 256",
        "static 256",
    }
    assert sum(points[1] for points in found["chunking"]["ways"]["static 64"]["points"]) == 512
    assert [row["history"] for row in found["batching"]["rows"]] == [0, 448]
    assert "off by the median" in said and "static 256" in said and "same chunk" in said


@pytest.mark.slow
def test_workers_over_nixl_from_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("nixl_cu13", reason="KVP workers exchange over NIXL")
    found, said = document(tmp_path, "kvp")
    assert [(row["context"], row["kvp"]) for row in found["kvp"]["token"]] == [(256, 1), (256, 2)]
    assert [row["workers"] for row in found["kvp"]["growth"]] == [1, 2]
    assert all(row["attention_s"] > 0.0 for row in found["kvp"]["token"])
    assert "workers join" in said


@pytest.mark.slow
def test_stages_from_end_to_end(tmp_path: Path) -> None:
    found, said = document(tmp_path, "spp")
    one, two = found["spp"]["rows"]
    assert (one["stages"], one["speedup"], one["efficiency"]) == (1, 1.0, 1.0)
    assert two["stages"] == 2 and two["speedup"] == one["prompt_s"] / two["prompt_s"]
    assert two["efficiency"] == two["speedup"] / min(2, found["spp"]["cores"])
    assert two["checked_over_prompt"] == two["checked_s"] / two["prompt_s"]
    assert "checked_s" not in one and found["spp"]["sum_s"] > 0.0
    assert "through stages of one thread" in " ".join(said.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parts": "sp"}, "'sp' is not one of predictor, chunking, batching, spp, kvp"),
        ({"dtype": "int8"}, "'int8' is not one of float32, bfloat16"),
        ({"static": "0"}, "--static '0'"),
    ],
)
def test_options_that_make_no_sense_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        long.command(**arguments)
