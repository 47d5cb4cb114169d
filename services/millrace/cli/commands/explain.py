"""`millrace explain`: why a request waits, or waited, now or in a recorded run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from millrace.cli.process import write_json
from millrace.core.scheduler.explanation.explain import Explanation
from millrace.sim.explained import explain_recorded
from millrace.wire.clients.scheduler_client import UnknownRequest, explain


async def show(address: str, request_id: str, json_path: Path | None) -> None:
    """Prints the explanation.

    Raises MillraceError if no scheduler answers, for an unknown request and for a bad path.
    """
    found = await explain(address, request_id)
    _print(found)
    if json_path is not None:
        write_json(json_path, asdict(found))


def show_recorded(path: Path, request_id: str, json_path: Path | None) -> None:
    """Prints what the scheduler of a recorded run would have said, moment by moment.

    Raises MillraceError for an unknown request, for a file that is no recording and for a bad path.
    """
    moments = explain_recorded(path, request_id)
    if not moments:
        raise UnknownRequest(f"{path} has no request {request_id!r}")
    for moment in moments:
        print(f"-- {moment.when}, {moment.after_s:.3g} s after its arrival")
        _print(moment.explanation)
    if json_path is not None:
        write_json(json_path, {"moments": [asdict(moment) for moment in moments]})


def _print(found: Explanation) -> None:
    for name, text in lines(found):
        print(f"{name:<13}{text}".rstrip())


def lines(found: Explanation) -> Iterator[tuple[str, str]]:
    """Yields the rows of the explanation; a row without a name belongs to the row before it."""
    yield "request", f"{found.request_id}, {found.state}, class {found.slo_class}"
    if found.key:
        yield "order", f"{found.policy}, {found.key}"
    if found.waits_for:
        yield "waits for", found.waits_for
    if found.left_s:
        yield "left", f"{found.left_s:.3g} s of prefill"
    if found.first_token_s is not None:
        judged = {True: ", in time", False: ", late", None: ""}[found.in_time]
        yield "first token", f"{found.first_token_s:.3g} s after its arrival{judged}"
    figures = {
        "class in time": None if found.attainment is None else f"{found.attainment:.1%}",
        "value": None if found.value is None else f"{found.value:.3g}",
        "stretch": None if found.stretch is None else f"{found.stretch:.3g}",
    }
    known = ", ".join(f"{name} {text}" for name, text in figures.items() if text is not None)
    if known:
        yield "figures", known
    yield from _rows(
        "ahead",
        [
            f"{one.requests} {one.part or 'in the order'}, {one.seconds:.3g} s"
            for one in found.ahead
        ],
    )
    yield from _rows(
        "before it",
        [
            f"{one.request_id}, {one.seconds:.3g} s" + (f" ({one.key})" if one.key else "")
            for one in found.before
        ],
    )
    yield from _rows(
        "waited",
        [
            f"{one.seconds:.3g} s for {one.reason}" + (f" ({one.part})" if one.part else "")
            for one in found.waited
        ],
    )
    if found.suspended_by:
        yield "suspended by", ", ".join(found.suspended_by)
    yield from _rows("would help", [f"{one.what}: {one.saves_s:.3g} s" for one in found.helps])


def _rows(name: str, texts: list[str]) -> Iterator[tuple[str, str]]:
    for number, text in enumerate(texts):
        yield ("" if number else name), text
