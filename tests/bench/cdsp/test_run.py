"""`millrace bench cdsp`: its figures, its report, and a whole run on a tiny model."""

from __future__ import annotations

import asyncio
import io
import json

import pytest
import typer
from rich.console import Console

from millrace.bench.cdsp import command as cdsp
from millrace.bench.cdsp import groups as cdsp_groups
from millrace.bench.cdsp import live as cdsp_live
from millrace.bench.cdsp import report as cdsp_report
from millrace.bench.cdsp import run as cdsp_run
from millrace.bench.cdsp.live import Mix, Served
from millrace.profiler.costs import Costs
from millrace.profiler.groups.run import ChunkTime, Run
from millrace.profiles import load_profile
from millrace.sim.workload.workload import plan

TINY = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


class Fleet:
    """A conductor: a token takes 1 ms divided by the group's size, with 10 % of waits in groups."""

    def __init__(self, moved: float = 1.0) -> None:
        self.moved = moved
        self.spent = [0.0] * 4

    async def run(self, chunks):
        told = []
        for number, (tokens, members) in enumerate(chunks):
            grew = number and len(members) > len(chunks[number - 1].members)
            compute_s = 1e-3 * tokens / len(members) * (self.moved if grew else 1.0)
            wait_s = 0.1 * compute_s * (len(members) > 1)
            told.append(ChunkTime(compute_s=compute_s, ring_wait_s=wait_s, history_wait_s=0.0))
            for member in members:
                self.spent[member] += compute_s
        total_s = sum(one.compute_s for one in told)
        return Run(
            chunks=tuple(told), started_s=0.01, ttft_s=total_s + 0.01, landed_s=total_s + 0.02
        )

    async def costs(self):
        none = dict.fromkeys(Costs.__slots__, 0.0)
        return [
            Costs(**{**none, "compute_s": s, "cpu_s": 1.5 * s, "handshake_s": 0.1 * s})
            for s in self.spent
        ]


def announce(what):
    pass


def test_degrees_are_compared_with_one_instance():
    rows = asyncio.run(cdsp_groups.scaling(Fleet(), [100, 1000], [1, 4], 2, announce))
    by_case = {(row["tokens"], row["sp"]): row for row in rows}
    four = by_case[1000, 4]
    assert four["speedup"] == pytest.approx(1.01 / 0.26)
    assert four["ring_wait_s"] == pytest.approx(0.025)
    assert four["members_s"] == pytest.approx(1.0)
    assert four["compute_overhead"] == pytest.approx(0.0)
    assert by_case[100, 1]["cpu_overhead"] == 0.0
    found = cdsp_groups.handshakes(rows)
    assert found["landing_most"] == pytest.approx(0.01 / (0.025 + 0.01))
    assert found["handshake_mean"] < found["handshake_most"] < 0.1


def test_balancing_is_what_a_grown_group_takes_more():
    rows = asyncio.run(
        cdsp_groups.balancing(Fleet(moved=1.02), 100, [0.5, 2.0], [(1, 2), (2, 4)], 3, announce)
    )
    assert [(row["history"], row["from"], row["to"]) for row in rows] == [
        (50, 1, 2),
        (50, 2, 4),
        (200, 1, 2),
        (200, 2, 4),
    ]
    assert all(row["overhead"] == pytest.approx(0.02) for row in rows)


# ---- under load


MIX = Mix(short_tokens=500, long_tokens=60_000, requests=200, seed=1)


def test_a_mix_is_the_same_at_every_rate():
    slow, fast = (list(plan(MIX.at(rate))) for rate in (1.0, 4.0))
    assert [r.input_tokens for r in slow] == [r.input_tokens for r in fast]
    assert slow[-1].arrival_s == pytest.approx(4 * fast[-1].arrival_s)
    names = [r.slo.name for r in slow]
    assert 0.1 < names.count("long") / 200 < 0.3
    assert all(30_000 <= r.input_tokens <= 60_000 for r in slow if r.slo.name == "long")


def test_cdsp_is_ahead_where_instances_have_devices_of_their_own(tmp_path):
    profile = load_profile("llama3-8b-a100-tp1")
    served = Served(
        model="m", profile_path=tmp_path, instances=8, threads=1, token_ids=None, settings=[]
    )
    rate_rps = 0.5 * MIX.capacity_rps(profile, 8)
    found = {
        planner: cdsp_live.simulated(planner, served, profile, list(plan(MIX.at(rate_rps))), 0.25)
        for planner in cdsp_live.PLANNERS
    }
    assert found["cdsp"]["mean_s"] < found["fixed_sp"]["mean_s"]
    assert all(0.25 < one["p50_s"] < one["p99_s"] for one in found.values())


def test_figures():
    found = cdsp_live.figures([0.1 * n for n in range(100, 0, -1)])
    assert found == pytest.approx({"mean_s": 5.05, "p50_s": 5.05, "p99_s": 9.9})


# ---- settings


@pytest.mark.parametrize(
    ("instances", "degrees"), [(2, (2,)), (3, (2, 3)), (4, (2, 4)), (6, (2, 4, 6))]
)
def test_degrees_under_load(instances, degrees):
    assert cdsp_run.Settings(instances=instances).group_degrees == degrees


def test_a_part_alone_starts_what_it_needs():
    assert cdsp_run.Settings(parts=("ring",), instances=2).fleet == 0
    assert cdsp_run.Settings(parts=("load",), instances=2).fleet == 2
    assert cdsp_run.Settings(parts=("sp",), instances=8, degrees=(1, 3)).fleet == 3
    assert cdsp_run.Settings(parts=("load", "balancing"), instances=2).fleet == 4


def test_prompts_that_do_not_fit_are_refused():
    with pytest.raises(Exception, match="a prompt of 20000 tokens is too long"):
        asyncio.run(cdsp_run.run(cdsp_run.Settings(lengths=(20_000,))))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parts": "sp,gpu"}, "'gpu' is not one of"),
        ({"lengths": "10,x"}, "--lengths '10,x'"),
        ({"degrees": "0"}, "--sp '0'"),
    ],
)
def test_options_that_make_no_sense(arguments, message):
    with pytest.raises(typer.BadParameter, match=message):
        cdsp.command(**arguments)


# ---- a whole run


@pytest.mark.slow
def test_a_whole_run_and_its_report(monkeypatch, tmp_path):
    monkeypatch.setattr(cdsp_run, "LLAMA_27M", TINY)
    monkeypatch.setattr(cdsp_run, "PLANNERS", ("cdsp", "fixed_sp"))
    settings = cdsp_run.Settings(
        kv_bytes=1 << 23,
        lengths=(200, 900),
        degrees=(1, 2),
        rounds=1,
        chunk_tokens=300,
        shares=(0.5,),
        growths=((1, 2),),
        ring_mib=(1,),
        ring_members=(2,),
        ring_repeats=1,
        instances=2,
        loads=(0.01,),
        short_tokens=20,
        long_tokens=800,
        requests=8,
        operators_s=0.5,
        profile_s=1.0,
    )
    said = []
    document = json.loads(json.dumps(asyncio.run(cdsp_run.run(settings, said.append))))
    assert [(row["tokens"], row["sp"]) for row in document["sp"]] == [
        (200, 1),
        (200, 2),
        (900, 1),
        (900, 2),
    ]
    assert all(row["compute_s"] > 0 for row in document["sp"])
    assert any(row["cpu_s"] > 0 for row in document["sp"])  # counted in ticks of 10 ms
    assert document["profile"]["measured_sp"] == [2]
    (balancing,) = document["balancing"]
    assert balancing["moved_s"] > 0 and balancing["wait_share"] < 1
    (run,) = document["load"]["runs"]
    for side in ("live", "simulated"):
        assert set(run[side]) == {"cdsp", "fixed_sp"}
        assert run[side]["cdsp"]["mean_ratio"] == 1.0
    assert document["ring"][0]["ratio"] > 0
    assert any(what.startswith("fixed_sp: ") for what in said)

    console = Console(record=True, width=200, file=io.StringIO())
    cdsp_report.print_tables(document, console)
    text = console.export_text()
    for part in ("TTFT", "Handshakes", "Cache balancing", "Ring exchange", "under load"):
        assert part in text
    cdsp_report.draw(document, tmp_path / "cdsp.png")
    assert (tmp_path / "cdsp.png").read_bytes().startswith(b"\x89PNG")
