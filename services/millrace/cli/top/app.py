"""`millrace top`: a running fleet in the terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import ClassVar

import orjson
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Static

from millrace.cli.top.fleet_now import FleetNow, InstanceNow, RequestNow
from millrace.core.errors import MillraceError

#: Lines of the board as they come.
Watch = Callable[[], AsyncGenerator[bytes, None]]

REFRESH_S = 0.5
#: The time before a stream that ended is opened again.
AGAIN_S = 2.0
MOST_REQUESTS = 200
_BAR = 10

_ROLES = ("prefill", "mixed", "decode", "kvp")
INSTANCE_COLUMNS = ("instance", "role", "work", "running", "waiting", "queue s", "KV", "computes")
REQUEST_COLUMNS = ("request", "class", "key", "state", "tokens", "group", "TTFT s", "TTFT/SLO")

#: Ways to sort the requests, the first row first.
ORDERS: dict[str, Callable[[RequestNow, float], float]] = {
    "TTFT/SLO": lambda one, now_s: -(one.slo_share(now_s) or 0.0),
    "oldest": lambda one, now_s: one.arrival_s,
    "longest": lambda one, now_s: -one.arrived.prompt_tokens,
}


class Top(App[None]):
    """Shows the instances, and the requests that have not ended."""

    TITLE = "millrace top"
    CSS = """
    #summary { height: auto; padding: 0 1; }
    #instances { height: 2fr; }
    #requests { height: 3fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("s", "sort", "Sort requests"),
        Binding("c", "filter_class", "Next class"),
        Binding("space", "freeze", "Freeze"),
    ]

    def __init__(self, watch: Watch, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._watch = watch
        self._clock = clock
        self._fleet = FleetNow()
        self._heard_at = clock()
        self._failure = ""
        self._order = next(iter(ORDERS))
        self._class = ""  # empty: all
        self._frozen = False

    def compose(self) -> ComposeResult:
        yield Static(id="summary")
        yield DataTable(id="instances", cursor_type="row")
        yield DataTable(id="requests", cursor_type="row")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#instances", DataTable).add_columns(*INSTANCE_COLUMNS)
        self.query_one("#requests", DataTable).add_columns(*REQUEST_COLUMNS)
        self.set_interval(REFRESH_S, self.show)
        self.run_worker(self._follow(), exclusive=True)

    async def _follow(self) -> None:
        """Takes lines in; opens the stream again when it ends."""
        while True:
            try:
                async with aclosing(self._watch()) as parts:
                    async for part in parts:
                        self._fleet.add(map(orjson.loads, part.splitlines()))
                        self._heard_at = self._clock()
                        self._failure = ""
                self._failure = "the scheduler ended the stream"
            except MillraceError as error:
                self._failure = str(error)
            self.show()
            await asyncio.sleep(AGAIN_S)

    # ---- keys

    def action_sort(self) -> None:
        """Sorts the requests in the next way."""
        names = list(ORDERS)
        self._order = names[(names.index(self._order) + 1) % len(names)]
        self.show()

    def action_filter_class(self) -> None:
        """Shows the requests of the next class, after the last one all."""
        names = ["", *sorted({one.arrived.slo_class for one in self._fleet.requests.values()})]
        at = names.index(self._class) if self._class in names else 0
        self._class = names[(at + 1) % len(names)]
        self.show()

    def action_freeze(self) -> None:
        """Stops the picture, or lets it go on; lines are taken in all the time."""
        self._frozen = not self._frozen
        self.show()

    # ---- what is shown

    def show(self) -> None:
        """Draws the fleet as it is now, unless the picture is frozen."""
        self.query_one("#summary", Static).update(self.summary())
        if self._frozen:
            return
        now_s = self._fleet.now_s + max(0.0, self._clock() - self._heard_at)
        ordered = sorted(self._fleet.instances.values(), key=_place)
        _fill(self.query_one("#instances", DataTable), map(_instance_row, ordered))
        _fill(self.query_one("#requests", DataTable), self._request_rows(now_s))

    def summary(self) -> str:
        """Returns the line above the tables."""
        if self._failure:
            return f"{self._failure}; trying again"
        fleet, settings = self._fleet, self._fleet.settings
        waiting = sum(not one.running and one.ttft_s is None for one in fleet.requests.values())
        parts = [
            f"policy {settings.policy or '-'}",
            f"improvement rate {settings.improvement_rate:.2f}",
            f"{len(fleet.requests)} requests, {waiting} wait",
            f"{settings.preemptions} preemptions",
        ]
        if fleet.in_time is not None:
            parts.append(f"first tokens {fleet.in_time:.1%} in time")
        parts.append(f"by {self._order}" + (f", class {self._class}" if self._class else ""))
        if self._frozen:
            parts.append("frozen")
        if fleet.notice:
            parts.append(fleet.notice)
        return " · ".join(parts)

    def _request_rows(self, now_s: float) -> Iterator[tuple[str | Text, ...]]:
        order = ORDERS[self._order]
        shown = [
            one
            for one in self._fleet.requests.values()
            if not self._class or one.arrived.slo_class == self._class
        ]
        shown.sort(key=lambda one: order(one, now_s))
        return (_request_row(one, now_s) for one in shown[:MOST_REQUESTS])


def _fill(table: DataTable[str | Text], rows: Iterator[tuple[str | Text, ...]]) -> None:
    """Replaces the rows; the cursor and the scrolling stay."""
    cursor, scroll = table.cursor_row, table.scroll_y
    table.clear()
    for row in rows:
        table.add_row(*row)
    table.move_cursor(row=min(cursor, max(table.row_count - 1, 0)), scroll=False)
    table.scroll_to(y=scroll, animate=False)


def _place(one: InstanceNow) -> tuple[int, int, str]:
    rank = _ROLES.index(one.card.role) if one.card.role in _ROLES else len(_ROLES)
    return rank, len(one.card.id), one.card.id


def _instance_row(one: InstanceNow) -> tuple[str | Text, ...]:
    filled = round(one.kv_share * _BAR)
    bar = Text("█" * filled + "░" * (_BAR - filled) + f" {one.kv_share:4.0%}")
    chunks = ", ".join(f"{request}/{chunk}" for request, chunk in one.chunks)
    usage = one.usage
    return (
        *(one.card.id, one.card.role, "yes" if one.card.takes_work else "no"),
        *(str(usage.running), str(usage.waiting), f"{usage.queue_s:.2f}"),
        *(bar, chunks),
    )


def _request_row(one: RequestNow, now_s: float) -> tuple[str | Text, ...]:
    share = one.slo_share(now_s)
    late = Text("-") if share is None else Text(f"{share:.2f}", style="red" if share > 1 else "")
    state = f"computes on {len(next(iter(one.running.values())))}" if one.running else one.state
    return (
        *(one.arrived.id, one.arrived.slo_class, one.arrived.tenant, state),
        *(str(one.arrived.prompt_tokens), str(one.group or "-")),
        *(f"{one.ttft_so_far_s(now_s):.2f}", late),
    )
