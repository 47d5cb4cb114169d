"""`millrace sim fit`: a profile from a table of prefill times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.process import plain_errors
from millrace.cli.sim import arguments as of
from millrace.file_options import READ, WRITE


@plain_errors()
def fit_command(
    table: Annotated[
        Path,
        typer.Argument(help="CSV: tokens, seconds and, if needed, history and sp.", **READ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE.json", help="The profile.", **WRITE)],
    like: Annotated[
        str,
        typer.Option(
            "--like", metavar="NAME|FILE.json", help="Profile of the same model; gives the rest."
        ),
    ] = of.DEFAULT_PROFILE,
) -> None:
    """Fit a profile's prefill times (Tetris Eq. (1)) to a table of your own measurements."""
    from millrace.core.errors import ConfigError
    from millrace.profiles import encode, load_profile
    from millrace.profiles.cache import write_whole
    from millrace.profiles.own_table import fitted, read_table

    if out.suffix != ".json":
        raise ConfigError(f"--out {out}: a profile's file ends in .json")
    found = fitted(read_table(table), load_profile(like), out.stem)
    write_whole(out, encode(found.to_json()))
    for sp in (1, *found.measured_sp):
        one = found.prefill.by_sp[sp]
        error = found.errors.get(f"sp{sp}_history")
        after = "" if error is None else f"; after histories off by {error:.1%} (median)"
        print(
            f"sp {sp}: a {one.a:.3g}, b {one.b:.3g}, c {one.c:.3g}, d {one.d:.3g}, "
            f"{len(one.points)} points{after}"
        )
