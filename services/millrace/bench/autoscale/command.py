"""`millrace bench autoscale`: a stack that scales itself beside stacks of fixed size.

All in one run on this machine, with the random model of `bench hol` on one thread an instance: the
same requests in a calm, a peak and a calm again, sent to a stack with the least number of prefill
instances, to one that scales from the least to the most (`millrace up --autoscale`), and to one
with the most. What counts is the share of requests whose first token came in time, and the seconds
of prefill instances that this took. A run in which a request is lost fails.

Rates and objectives are relative to what one instance does here, measured first. Instances share
this machine's cores with the scheduler, the proxy, decode and the client: a second prefill instance
brings less than on a machine of its own, and the start of one takes time from those that serve.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from millrace.bench.common.options import measure


def command(  # noqa: PLR0913 - every option of the command line is a parameter
    calm: Annotated[
        float, typer.Option("--calm", min=0.01, help="Load of one instance's capacity.")
    ] = 0.3,
    peak: Annotated[float, typer.Option("--peak", min=0.01, help="Likewise.")] = 1.4,
    calm_s: Annotated[
        float, typer.Option("--calm-s", min=1.0, help="Seconds of the first calm.")
    ] = 10.0,
    peak_s: Annotated[float, typer.Option("--peak-s", min=1.0)] = 35.0,
    after_s: Annotated[
        float, typer.Option("--after-s", min=1.0, help="Seconds of the second calm.")
    ] = 60.0,
    most: Annotated[int, typer.Option("--most", min=2, help="Prefill instances at most.")] = 2,
    slo: Annotated[
        float, typer.Option("--slo", min=1.0, help="TTFT objective, in TTFTs of a prompt alone.")
    ] = 5.0,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=16)] = 768,
    seed: Annotated[int, typer.Option("--seed", help="Of arrivals, lengths and prompts.")] = 0,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the report as JSON.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PATH", help="PNG: load, backlog, instances, attainment."),
    ] = None,
) -> None:
    """Autoscaling beside fixed sizes: SLO attainment and instance-seconds in calm and peak."""
    from millrace.bench.autoscale.report import draw, print_tables
    from millrace.bench.autoscale.run import Phase, Settings, run

    settings = Settings(
        phases=(
            Phase(name="calm", load=calm, seconds=calm_s),
            Phase(name="peak", load=peak, seconds=peak_s),
            Phase(name="calm again", load=calm, seconds=after_s),
        ),
        most=most,
        slo_factor=slo,
        prompt_tokens=prompt_tokens,
        seed=seed,
    )
    measure(partial(run, settings), print_tables, draw, json_path, plot)
