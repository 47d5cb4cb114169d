"""`millrace bench hol`: measures head-of-line blocking in prefill, for FlowPrefill's figures.

All parts run on this machine. In this process: a profile of the model, the time that a preemption
waits (section 6.4, figure 12), and the cost of checks at operators. Then, for one system after
another, a live stack of one prefill and one decode instance: the highest rate with 90 % of the
requests in time (goodput, section 6.1, figure 9), and short prompts that arrive during a long
prompt. The simulator runs the same requests with the profile of this run.

The model is a random Llama of 27 million parameters in 16 layers: deep and thin, so that one
operator takes about the same share of a prompt as on the paper's 8B, and so fast on one thread
(some 1,400 tokens/s on a machine with AVX2) that prompts a twentieth as long as the paper's take
tens (text) and hundreds (search, file) of milliseconds. Requests ask for one token: decode shares
the cores with prefill here and is not measured.

Objectives are multiples of isolated TTFTs (`traffic.py`); they are measured once, on the first
system's stack, and hold for all systems. A search begins at the goodput that the simulator
predicts.

How far an order can get ahead of FCFS depends on the load: on how much longer files and searches
take than texts (11 times in the paper), and on how close FCFS is to the rate that no order exceeds.
The document has both figures: choose `--scale` so that the first is near the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from millrace.bench.common.options import command as made
from millrace.bench.common.options import option, read_dtype, read_names, read_rates, read_seeds
from millrace.bench.hol.systems import FCFS, NAMES, OURS

_QUICK = (FCFS, "edf-small", OURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """model: a folder, "" for the random model. threads: per engine; 0: half the cores.

    rates: requests/s to run every system at; without any, each system's goodput is searched: in
    steps of the factor `step` and then within 1 + `tolerance`, `most_runs` runs at most. Runs have
    `requests` requests, or more if they would be shorter than `run_objectives` of the longest
    objective, drawn again for each of `seeds`. repeats: of an isolated TTFT; shorts:
    short prompts during long prompts. profile_s and blocking_s (per granularity) are budgets in
    seconds.
    """

    model: str = option(
        "", "--model", metavar="FOLDER", help="Default: a random Llama, 27M parameters."
    )
    dtype: str = option("float32", "--dtype", read=read_dtype, help="float32 or bfloat16.")
    threads: int = option(0, "--threads", min=0, help="Of each engine; 0: half the cores.")
    kv_bytes: int = 1 << 29
    scale: float = option(
        20.0, "--scale", min=1.0, help="Prompts and chunks are the paper's over this."
    )
    slo_scale: float = option(1.0, "--slo-scale", min=0.01, help="Times all objectives.")
    systems: tuple[str, ...] = option(
        NAMES,
        "--systems",
        read=read_names(*NAMES),
        metavar="NAME,...",
        help="Of " + ", ".join(NAMES) + ".",
    )
    rates: tuple[float, ...] = option(
        (), "--rates", read=read_rates, metavar="RATE,...", help="Requests/s; default: a search."
    )
    tolerance: float = option(0.12, "--tolerance", min=0.01, help="The search's, as a share.")
    requests: int = option(100, "--requests", min=10, help="Of every run, at least.")
    run_objectives: float = option(
        10.0, "--run-objectives", min=0.0, help="Least length of a run, in longest objectives."
    )
    seeds: tuple[int, ...] = option(
        (0,), "--seeds", read=read_seeds, metavar="SEED,...", help="A draw of requests each."
    )
    long_tokens: int = option(
        2048, "--long-tokens", min=64, help="Of the prompt that short ones meet."
    )
    step: float = 1.25
    most_runs: int = 5
    repeats: int = 7
    shorts: int = 12
    profile_s: float = 30.0
    blocking_s: float = 6.0
    check_rounds: int = 20

    def quick(self) -> Settings:
        """Returns settings for a short run: its figures are not to be quoted."""
        return replace(
            self,
            systems=_QUICK if self.systems == NAMES else self.systems,
            requests=min(self.requests, 30),
            run_objectives=min(self.run_objectives, 2.0),
            tolerance=0.6,
            step=1.5,
            most_runs=3,
            repeats=3,
            shorts=4,
            long_tokens=min(self.long_tokens, 1024),
            profile_s=9.0,
            blocking_s=1.5,
            check_rounds=4,
        )


command = made(
    Settings,
    "Head-of-line blocking: goodput by system, live and simulated, and what preemption costs.",
    plot="PNG: attainment by rate and class, blocking.",
    quick="A look, no figures to quote: three systems, short runs.",
)
