"""The options that the commands of `millrace sim` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.core.config import SchedulerConfig
from millrace.core.priority import POLICIES
from millrace.core.scheduler.planning import PLANNERS
from millrace.file_options import READ, TRACE_FORMATS, WRITE
from millrace.sim.workload.mixes import MIXES

Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help=TRACE_FORMATS,
        **READ,
    ),
]
MixName = Annotated[
    str, typer.Option("--mix", metavar="NAME", help=f"Synthetic traffic: {', '.join(MIXES)}.")
]
Window = Annotated[
    str,
    typer.Option("--window", metavar="START_S:END_S", help="Use only this time span of the trace."),
]
Rate = Annotated[
    float | None,
    typer.Option("--rate", help="Poisson arrivals, requests/s. Default: the trace's own times."),
]
RateScale = Annotated[float, typer.Option("--rate-scale", help="Divides gaps between arrivals.")]
SloScale = Annotated[float, typer.Option("--slo-scale", help="Multiplies all objectives.")]
SloClasses = Annotated[
    list[str],
    typer.Option(
        "--slo-class",
        metavar="NAME:TTFT_MS:TBT_MS[:WEIGHT[:E2E_MS]]",
        help="Objectives of a class (0: none) and its share of traffic; repeatable. Without a TTFT "
        "objective: 1.5 x the prefill alone, at least 0.5 s.",
    ),
]
LongFraction = Annotated[
    float, typer.Option("--long-fraction", help="medha-mix: share of long requests.")
]
Requests = Annotated[
    int | None,
    typer.Option("--requests", help="Number of requests. Default: all of a trace, 1000 of a mix."),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of lengths, classes, arrivals and noise.")]
ProfileName = Annotated[
    str, typer.Option("--profile", metavar="NAME|FILE.json", help="Model and device of a worker.")
]
DecodeProfile = Annotated[
    str,
    typer.Option("--decode-profile", metavar="NAME|FILE.json", help="Default: as --profile."),
]
Prefill = Annotated[int, typer.Option("--prefill", help="Prefill instances.")]
Decode = Annotated[int, typer.Option("--decode", help="Decode instances.")]
Mixed = Annotated[
    int, typer.Option("--mixed", help="Instances that prefill and decode in one batch.")
]
Kvp = Annotated[int, typer.Option("--kvp", help="Workers that hold shards of long requests.")]
Spp = Annotated[int, typer.Option("--spp", help="Pipeline stages of a mixed instance.")]
Failures = Annotated[
    list[str],
    typer.Option(
        "--failure",
        metavar="AT_S:INSTANCE[:DOWN_S]",
        help="An instance (p0, d0, m0, k0, ...) dies and returns after DOWN_S (30 s); repeatable.",
    ),
]
Errors = Annotated[
    list[str],
    typer.Option(
        "--errors",
        metavar="AT_S:INSTANCE[:FOR_S[:SHARE]]",
        help="For FOR_S (30 s), SHARE (1) of the chunks of a prefill instance fail; repeatable.",
    ),
]
Slow = Annotated[
    list[str],
    typer.Option(
        "--slow",
        metavar="AT_S:INSTANCE[:FOR_S[:FACTOR]]",
        help="For FOR_S (30 s), chunks of a prefill instance take FACTOR (10) times as long; "
        "repeatable.",
    ),
]
Autoscale = Annotated[
    list[str],
    typer.Option(
        "--autoscale",
        metavar="POOL:LEAST:MOST",
        help="A pool (prefill, decode, mixed) grows and shrinks between two sizes; repeatable. "
        "Pods take autoscale.start_s to start.",
    ),
]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="TABLE.FIELD=VALUE",
        help="Any other setting of scheduler, sim, packing or autoscale; repeatable.",
    ),
]
Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="PATH", help="Write all figures as JSON.", **WRITE),
]
POLICY_HELP = f"Order of work: {', '.join(POLICIES)}."
PLANNER_HELP = f"Placement: {', '.join(PLANNERS)}."
PREEMPTION_HELP = "Where a running prefill may be stopped: none, chunk, layer, operator."
BATCH_HELP = "Most tokens of prompts that are computed together; 0: one prompt at a time."

DEFAULT_PROFILE = "llama3-8b-a100-tp1"
DEFAULTS = SchedulerConfig()  # a simulated scheduler decides as a live scheduler
