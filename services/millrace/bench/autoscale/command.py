"""`millrace bench autoscale`: compares an autoscaled stack with stacks of fixed size.

All stacks run one after another on this machine, with the random model of `bench hol` and one
thread per instance. Each gets the same requests in a calm phase, a peak and another calm phase. The
first stack has the least number of prefill instances, the second scales from the least to the most
(`millrace up --autoscale`), the third has the most. The result is the share of requests with a
first token in time, and the seconds of prefill instances used. A run fails if it loses a request.

Rates and objectives are relative to one instance's capacity here, measured first. Instances share
this machine's cores with the scheduler, the proxy, decode and the client: a second prefill instance
adds less capacity than on a machine of its own, and its start takes time from the others.
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
