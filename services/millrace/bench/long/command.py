"""`millrace bench long`: measures long contexts, for Mnemosyne's and Medha's figures.

All parts run on this machine, with a random Llama of 27 million parameters. On one engine: the
error of predictions of mixed batches (Medha section 4.3); a long prompt beside decodes in adaptive
and in static chunks (Mnemosyne Figure 8, Medha Figure 4); the cost of short decodes for an
iteration of a long prefill (Mnemosyne Figure 22). On several engines: the time between tokens and
of an iteration when a context lies at up to four workers (KVP, Mnemosyne section 4.4 and Figure
19), which are processes that exchange queries and partial results over NIXL.

Also the speedup of a long prompt whose chunks follow each other through stages (SPP, Mnemosyne
section 4.3).

KVP workers share this machine's cores; a pass's time with cores of their own is computed from CPU
times and communication, and shown beside the measured time (`kvp.py`).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from millrace.bench.common.choices import LONG_PARTS
from millrace.bench.common.options import measure, names, numbers


def command(  # noqa: PLR0913 - every option of the command line is a parameter
    parts: Annotated[
        str, typer.Option("--parts", metavar="NAME,...", help="Of " + ", ".join(LONG_PARTS) + ".")
    ] = ",".join(LONG_PARTS),
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "bfloat16",
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="Of the engine; 0: all cores. Of kvp: 1 each.")
    ] = 0,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1024, max=65_536, help="Of the long prompt.")
    ] = 24_576,
    static: Annotated[
        str, typer.Option("--static", metavar="TOKENS,...", help="Static chunks.")
    ] = "128,512,2048",
    chunk_tokens: Annotated[
        int, typer.Option("--chunk-tokens", min=64, max=2048, help="Of the part batching.")
    ] = 512,
    degrees: Annotated[
        str, typer.Option("--kvp", metavar="N,...", help="Workers of a context.")
    ] = "1,2,4",
    contexts: Annotated[
        str, typer.Option("--contexts", metavar="TOKENS,...", help="Of the part kvp.")
    ] = "4096,8192,16384,32768,65536",
    quick: Annotated[
        bool, typer.Option("--quick", help="A look, no figures to quote: less of everything.")
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the report as JSON.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PATH", help="PNG: errors, iterations, decodes, shards."),
    ] = None,
) -> None:
    """Long contexts: predictions, adaptive chunks, decodes beside a prefill, stages, KVP."""
    from millrace.bench.long.report import draw, print_tables
    from millrace.bench.long.run import Settings, run

    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter(f"{dtype!r} is not one of float32, bfloat16")
    settings = Settings(
        parts=tuple(names(parts, LONG_PARTS)),
        dtype=dtype,
        threads=threads,
        prompt_tokens=prompt_tokens,
        static=numbers(static, "--static"),
        chunk_tokens=chunk_tokens,
        degrees=tuple(sorted({1, *numbers(degrees, "--kvp")})),
        contexts=numbers(contexts, "--contexts"),
    )
    if quick:
        settings = settings.quick()
    measure(partial(run, settings), print_tables, draw, json_path, plot)
