"""`millrace report`: a recorded run, or what Redis has of a fleet, in figures; what to change."""

from __future__ import annotations

import asyncio
import contextlib
import html
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.table import Table

from millrace.cli.process import write_json
from millrace.core.config import Config
from millrace.core.errors import ConfigError, MillraceError
from millrace.core.report.outcome import Outcome, decode_outcome
from millrace.core.report.pool_sample import TimedSample, decode_sample
from millrace.sim.replay import began_unix_s
from millrace.sim.reports.recorded import report_of_recording
from millrace.sim.reports.report import GroupRow, RunReport, Slot
from millrace.sim.reports.stored import report_of_outcomes
from millrace.state.open import open_outcomes
from millrace.state.outcomes import RedisOutcomes
from millrace.tables import Output, table

_HEADINGS = "{} | requests | refused | failed | TTFT in time | all met | TTFT p50 ms | p99 ms"
_CELLS = (
    "{name} | {requests:,} | {refused:,} | {failed:,} | {ttft_attainment:.1%} | {attainment:.1%} | "
    "{ttft_s[p50]:ms,.0f} | {ttft_s[p99]:ms,.0f}"
)


Make = Callable[[float, float, int], RunReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a report comes from.

    `began_s` is the Unix time from which it counts; None: not known. `make` gets the range in
    seconds after that time, and the number of worst requests.
    """

    name: str
    began_s: float | None
    make: Make
    hint: str


def recording_at(path: Path) -> Source:
    """Raises MillraceError for a file that is no recording."""

    def make(from_s: float, to_s: float, worst: int) -> RunReport:
        return report_of_recording(path, from_s=from_s, to_s=to_s, worst=worst)

    hint = "`millrace explain ID --recording FILE` says more"
    return Source(name=path.name, began_s=began_unix_s(path), make=make, hint=hint)


def kept_outcomes(config: Config) -> Source:
    """Reads what the scheduler of these settings has written. Raises MillraceError."""
    store = open_outcomes(config.store, config.scheduler.group)
    if store is None:
        raise ConfigError(
            "store.url is memory://, where nothing outlives its process: name a recording, or set "
            "store.url as the scheduler has it"
        )
    try:
        outcomes, samples = asyncio.run(_read(store, config.scheduler.group))
    except (ValueError, KeyError, TypeError) as error:
        raise MillraceError(f"store.url: another version has written these: {error!r}") from error
    began_s = min(one.arrived_s for one in outcomes)

    def make(from_s: float, to_s: float, worst: int) -> RunReport:
        return report_of_outcomes(
            outcomes, samples, began_unix_s=began_s, from_s=from_s, to_s=to_s, worst=worst
        )

    name = config.scheduler.group or "the fleet"
    hint = "`millrace explain ID` says more, for a while"
    return Source(name=name, began_s=began_s, make=make, hint=hint)


async def _read(store: RedisOutcomes, group: str) -> tuple[list[Outcome], list[TimedSample]]:
    try:
        outcomes = [decode_outcome(one) async for one in store.outcomes()]
        if not outcomes:
            known = ", ".join(map(repr, await store.groups())) or "no fleet"
            raise MillraceError(
                f"scheduler.group is {group!r}: Redis has no ended request of this fleet; it has "
                f"those of {known}"
            )
        return outcomes, [decode_sample(one) async for one in store.samples()]
    finally:
        await store.close()


def show(
    source: Source,
    *,
    from_: str,
    to: str,
    worst: int,
    json_path: Path | None,
    page: Path | None,
) -> None:
    """Prints the report, or writes it as a page; JSON besides.

    Raises MillraceError for a bad range, and for a bad path.
    """
    began_s = source.began_s
    from_s = _after_begin(from_, "--from", began_s) if from_ else 0.0
    to_s = _after_begin(to, "--to", began_s) if to else math.inf
    if not max(from_s, 0.0) < to_s:
        raise ConfigError(f"--from {from_!r}, --to {to!r}: no time of the run is between them")
    found = source.make(max(from_s, 0.0), to_s, worst)
    if json_path is not None:
        write_json(json_path, found.to_json())
    if page is None:
        console = Output()
        for part in parts(found, _lines(found.worst, source.hint)):
            console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
        return
    try:
        page.write_text(as_page(found, source), encoding="utf-8")
    except OSError as error:
        raise MillraceError(f"--html {page} can't be written: {error.strerror}") from error


def _after_begin(text: str, option: str, began_s: float | None) -> float:
    """Returns a time in seconds after the run's begin, from such a number or a time of day.

    A time without a zone is of this machine's zone. Raises ConfigError naming `option`.
    """
    with contextlib.suppress(ValueError):
        seconds = float(text)
        if 0.0 <= seconds < math.inf:
            return seconds
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{option} {text!r}: write seconds after the run's begin, at least 0, or a time such "
            "as 2026-01-31T14:30"
        ) from None
    if began_s is None:
        raise ConfigError(
            f"{option} {text!r}: the recording does not say when it began; write seconds"
        )
    return at.timestamp() - began_s


def parts(found: RunReport, worst: Table | str) -> Iterator[Table | str]:
    """Yields the tables of a report, and its notes; `worst` are its worst requests."""
    yield (
        f"{found.total.requests:,} requests that came from {found.from_s:,.0f} to "
        f"{found.to_s:,.0f} s of the run{_begin(found.began_unix_s)}"
    )
    for note in found.notes:
        yield f"note: {note}"
    yield _groups("Objectives met", "class", {**found.classes, "all": found.total})
    if len(found.tenants) > 1:
        yield _groups("By key", "key", found.tenants)
    if len(found.models) > 1:
        yield _groups("By model", "model", found.models)
    if found.worst:
        yield worst
    if found.late_waited_s:
        rows = ({"what": what, "seconds": s} for what, s in found.late_waited_s.items())
        title = "What late requests waited for"
        yield table(title, "for | s", "{what} | {seconds:,.2f}", rows, left=1)
    yield table(
        "Pools, by the targets of autoscaling",
        "pool | size | in use | busiest | headroom | wanted | most | advice | most because of",
        "{role} | {instances} | {in_use_mean:.0%} | {in_use_p95:.0%} | {headroom:.0%} | {wanted} | "
        "{wanted_most} | {advice} | {reason}",
        ({**asdict(pool), "headroom": pool.headroom} for pool in found.pools),
        left=1,
    )


def _begin(began_s: float | None) -> str:
    if began_s is None:
        return ""
    return f", which began at {datetime.fromtimestamp(began_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _groups(title: str, name: str, rows: Mapping[str, GroupRow]) -> Table:
    shown = ({"name": one, **asdict(row)} for one, row in rows.items())
    return table(title, _HEADINGS.format(name), _CELLS, shown, left=1)


def _lines(worst: list[Outcome], hint: str) -> str:
    """Returns the worst requests as text: a row of a table would be too long for a terminal."""
    lines = [f"Worst requests ({hint})", ""]
    for one in worst:
        after = "no first token" if one.ttft_s is None else f"TTFT {one.ttft_s:.2f} s"
        lines += [
            f" {one.request_id}: class {one.slo_class}, key {one.tenant}, "
            f"{one.prompt_tokens:,} tokens, {one.state}",
            f"   {after}, {one.lateness:.1f} times its objective; waited most {_waited_most(one)}",
        ]
        if one.helps:
            lines.append(f"   would have helped: {one.helps}")
    return "\n".join([*lines, ""])


def _worst(worst: list[Outcome], hint: str) -> Table:
    return table(
        f"Worst requests ({hint})",
        "request | class | key | tokens | TTFT s | of objective | waited most | would have helped",
        "{request_id} | {slo_class} | {tenant} | {prompt_tokens:,} | {ttft_s:.2f} | {lateness:.1f} "
        "| {waited_most} | {helps}",
        (
            {**asdict(one), "lateness": one.lateness, "waited_most": _waited_most(one)}
            for one in worst
        ),
        left=1,
    )


def _waited_most(one: Outcome) -> str:
    if not one.waited:
        return "nothing"
    most = one.waited[0]
    part = f" ({most.part})" if most.part else ""
    return f"{most.seconds:.2f} s for {most.reason}{part}"


# ---- as a page

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width">
<style>
:root {{ color-scheme: light dark; font: 14px/1.4 system-ui, sans-serif; }}
table {{ border-collapse: collapse; margin: 1em 0; }}
caption {{ text-align: left; font-weight: bold; }}
th, td {{ text-align: right; padding: 2px 8px; }}
th:first-child, td:first-child {{ text-align: left; }}
.late {{ fill: #c8322b; }} .met {{ fill: #3b7dd8; }} .free {{ fill: #8a8f98; }}
</style>
<h1>{title}</h1>
{body}
"""
_WIDE, _HIGH = 720, 120


def as_page(found: RunReport, source: Source) -> str:
    """Returns a page without scripts or other files: a picture and the tables."""
    first, *rest = parts(found, _worst(found.worst, source.hint))
    body = [_paragraph(first), _picture(found.slots), *map(_paragraph, rest)]
    return _PAGE.format(title=html.escape(f"Report of {source.name}"), body="\n".join(body))


def _paragraph(part: Table | str) -> str:
    if isinstance(part, str):
        return f"<p>{html.escape(part)}</p>"
    heads = "".join(f'<th scope="col">{html.escape(str(one.header))}' for one in part.columns)
    rows = zip(*(column.cells for column in part.columns), strict=True)
    lines = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}" for cell in row) for row in rows
    )
    caption = html.escape(str(part.title))
    return f"<table><caption>{caption}</caption><tr>{heads}</tr>\n{lines}\n</table>"


def _picture(slots: list[Slot]) -> str:
    """Draws the requests over time: in time, late, and without an objective."""
    most = max(1, *(slot.requests for slot in slots))
    wide = _WIDE / len(slots)
    bars = []
    for index, slot in enumerate(slots):
        below = 0.0
        late, free = slot.judged - slot.in_time, slot.requests - slot.judged
        for kind, count in (("met", slot.in_time), ("late", late), ("free", free)):
            high = _HIGH * count / most
            below += high
            if count:
                bars.append(
                    f'<rect class="{kind}" x="{index * wide:.1f}" y="{_HIGH - below:.1f}" '
                    f'width="{wide - 1:.1f}" height="{high:.1f}"/>'
                )
    said = (
        "Requests by the time of their arrival: first token in time (blue), late (red), not "
        f"judged (grey); at most {most} in {slots[1].from_s - slots[0].from_s:.3g} s."
    )
    return (
        f'<svg role="img" aria-label="{said}" viewBox="0 0 {_WIDE} {_HIGH}" width="{_WIDE}">'
        f"{''.join(bars)}</svg>\n<p>{said}</p>"
    )
