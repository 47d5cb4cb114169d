"""`millrace bench serve`: a load test of any OpenAI-compatible server. `run.py` sends it."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from millrace.file_options import READ, TRACE_FORMATS, WRITE

_DEFAULT_REQUESTS = 100
_DEFAULT_CONCURRENCY = 4


def command(  # noqa: PLR0913 - every option of the command line is a parameter
    url: Annotated[str, typer.Option("--url", help="Base URL.")] = "http://127.0.0.1:8080",
    model: Annotated[str, typer.Option("--model", help="Default: the first one served.")] = "",
    api_key: Annotated[str, typer.Option("--api-key", help="Sent as a bearer token.")] = "",
    rate: Annotated[
        float | None, typer.Option("--rate", min=1e-6, help="Poisson arrivals, requests/s.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", min=1, help="This many at once, the next when one ends."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help=f"{TRACE_FORMATS} Its arrivals are kept unless --rate or --concurrency is given.",
            **READ,
        ),
    ] = None,
    rate_scale: Annotated[
        float, typer.Option("--rate-scale", min=1e-6, help="Divides gaps between arrivals.")
    ] = 1.0,
    input_tokens: Annotated[
        str,
        typer.Option(
            "--input-tokens",
            metavar="LENGTHS",
            help="Prompt tokens: N, LOW:HIGH or lognormal:MEAN:STD. Default: the trace's, or 512.",
        ),
    ] = "",
    output_tokens: Annotated[
        str,
        typer.Option(
            "--output-tokens",
            metavar="LENGTHS",
            help="Tokens to generate, likewise. Default: the trace's, or 64.",
        ),
    ] = "",
    max_input_tokens: Annotated[
        int | None, typer.Option("--max-input-tokens", min=1, help="Longer prompts are cut.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Longer outputs are cut.")
    ] = None,
    slo_class: Annotated[
        list[str],
        typer.Option(
            "--slo-class",
            metavar="NAME:TTFT_MS:TBT_MS[:WEIGHT[:E2E_MS]]",
            help="A class of requests with its objectives (0: none) and share of traffic; "
            "repeatable.",
        ),
    ] = [],  # noqa: B006 - typer wants a literal default
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="Stop after this many.")
    ] = None,
    duration_s: Annotated[
        float | None, typer.Option("--duration-s", min=0.0, help="Send for this long, seconds.")
    ] = None,
    token_ids: Annotated[
        str,
        typer.Option("--token-ids", metavar="LOW:HIGH", help="Draw prompt ids from this range."),
    ] = "",
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = 0.0,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.1, help="For one request, seconds.")
    ] = 600.0,
    warmup: Annotated[
        int, typer.Option("--warmup", min=0, help="Short requests sent first, not counted.")
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Of lengths, arrivals and prompts.")] = 0,
    json: Annotated[Path | None, typer.Option("--json", metavar="PATH", **WRITE)] = None,
    records: Annotated[
        bool, typer.Option("--records", help="Put every request's figures into the JSON.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PATH", help="PNG: TTFT's CDF and SLO attainment.", **WRITE),
    ] = None,
) -> None:
    """Load test: TTFT, TBT and E2E percentiles, throughput, goodput and SLO attainment.

    Works against any OpenAI-compatible server. Prompts are token ids, so that lengths are exact.
    Exits with status 1 when no request succeeded.
    """
    settings = {name: value for name, value in locals().items() if name != "api_key"}
    import orjson
    import uvloop

    from millrace.bench.common.load_test import ServeOptions
    from millrace.bench.common.plot import draw
    from millrace.bench.common.report import print_report, summarise
    from millrace.bench.serve.run import id_range, lengths, run_with_progress
    from millrace.core.errors import PREFIX, ConfigError, MillraceError
    from millrace.sim.workload.traces import read_trace
    from millrace.sim.workload.workload import SloClass, WorkloadOptions
    from millrace.tables import Output

    console = Output()
    try:
        classes = [SloClass.parse(text) for text in slo_class] or [SloClass(name="default")]
        rows = [] if trace is None else read_trace(trace)
        if rate is not None and concurrency is not None:
            raise ConfigError("--rate and --concurrency exclude each other")
        is_timed = bool(rows) and rows[0].arrival_s is not None
        at_trace_times = is_timed and rate is None and concurrency is None
        if not at_trace_times and rate is None and concurrency is None:
            concurrency = _DEFAULT_CONCURRENCY
        if requests is None and duration_s is None:
            requests = len(rows) if at_trace_times else _DEFAULT_REQUESTS
        options = ServeOptions(
            url=url,
            model=model,
            api_key=api_key,
            token_ids=id_range(token_ids),
            temperature=temperature,
            timeout_s=timeout_s,
            warmup=warmup,
            concurrency=concurrency,
            workload=WorkloadOptions(
                trace=rows or None,
                rate_rps=rate,
                open_arrivals=concurrency is not None,
                rate_scale=rate_scale,
                input_tokens=lengths(input_tokens, "--input-tokens", "" if rows else "512"),
                output_tokens=lengths(output_tokens, "--output-tokens", "" if rows else "64"),
                max_input_tokens=max_input_tokens,
                max_output_tokens=max_tokens,
                classes=classes,
                requests=requests,
                duration_s=duration_s,
                seed=seed,
            ),
        )
        found = uvloop.run(run_with_progress(options, console))
    except MillraceError as error:
        print(f"{PREFIX}{error}", file=sys.stderr)
        raise typer.Exit(1) from None
    report = summarise(found, classes)
    print_report(report, classes, console)
    if plot is not None:
        draw(found, classes, plot)
    if json is not None:
        document: dict[str, object] = {
            "benchmark": "serve",
            "settings": settings,
            "results": report.to_json(),
        }
        if records:
            document["requests"] = [asdict(record) for record in found]
        json.write_bytes(orjson.dumps(document, default=str, option=orjson.OPT_INDENT_2))
    if not report.succeeded:
        raise typer.Exit(1)
