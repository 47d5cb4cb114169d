"""`millrace top` by textual's pilot: what it shows of lines, its keys, and a real scheduler."""

from __future__ import annotations

import asyncio
import json

from textual.widgets import DataTable, Static

from millrace.cli.top.app import Top
from millrace.core.board import events as board
from millrace.core.request import Chunk
from millrace.wire.clients.scheduler_client import SchedulerUnavailable, watch_board
from support import command
from support.deadlines import HANG_S
from support.scheduler_peers import scheduler, spec

CHUNK = Chunk(index=0, start_token=0, num_tokens=64, instance_ids=("p0", "p1"))
STORY = (
    (0.0, board.Instance(id="d0", role="decode", kv_pages=10)),
    (0.0, board.Instance(id="p10", role="prefill", kv_pages=10)),
    (0.0, board.Instance(id="p0", role="prefill", kv_pages=10)),
    (0.0, board.Instance(id="p1", role="prefill", kv_pages=10, takes_work=False)),
    (0.0, board.Fleet(policy="edf", improvement_rate=0.25, preemptions=3)),
    (1.0, board.Arrived(id="short", slo_class="chat", prompt_tokens=64, ttft_slo_s=0.5)),
    (2.0, board.Arrived(id="long", slo_class="document", prompt_tokens=900, ttft_slo_s=60.0)),
    (2.0, board.Planned(id="long", chunks=(CHUNK,))),
    (2.0, board.ChunkRuns(id="long", tokens=64, instances=("p0", "p1"))),
    (2.0, board.Usage(id="d0", used_pages=5, running=2, waiting=1)),
)


def lines(*told: tuple[float, board.BoardEvent]) -> bytes:
    head = board.head_line(board.Head(source="live"))
    found = [head, *(board.line_of(event, at_s) for at_s, event in told)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in found)


class Clock:
    """Stands still until the test moves `now`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Source:
    """A stream that the test feeds; None ends it with an error."""

    def __init__(self, *parts: bytes) -> None:
        self.parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        for part in parts:
            self.parts.put_nowait(part)

    async def __call__(self):
        while (part := await self.parts.get()) is not None:
            yield part
        raise SchedulerUnavailable("no scheduler at here:1")


def table(app: Top, name: str) -> list[list[str]]:
    found = app.query_one(f"#{name}", DataTable)
    return [[str(cell) for cell in found.get_row_at(row)] for row in range(found.row_count)]


def summary(app: Top) -> str:
    return str(app.query_one("#summary", Static).content)


async def shown(pilot, app: Top, text: str) -> str:
    """Waits until the summary has a text."""
    async with asyncio.timeout(HANG_S):
        while text not in summary(app):
            await pilot.pause()
            app.show()
    return summary(app)


async def test_instances_and_requests_as_they_are_now():
    clock = Clock()
    app = Top(Source(lines(*STORY)), clock)
    async with app.run_test(size=(140, 40)) as pilot:
        await shown(pilot, app, "policy edf")
        app.show()
        names = [row[0] for row in table(app, "instances")]
        assert names == ["p0", "p1", "p10", "d0"]
        first, second, _, decode = table(app, "instances")
        assert first[-1] == second[-1] == "long/0" and second[2] == "no"
        assert decode[3:5] == ["2", "1"] and decode[6] == "█████░░░░░  50%"
        assert "improvement rate 0.25 · 2 requests, 1 wait · 3 preemptions" in summary(app)
        short, long = table(app, "requests")
        assert short == ["short", "chat", "default", "queued", "64", "-", "1.00", "2.00"]
        assert long[:6] == ["long", "document", "default", "computes on 2", "900", "2"]
        clock.now += 1.0  # between lines, time goes on
        app.show()
        assert table(app, "requests")[0][-2:] == ["2.00", "4.00"]


async def test_keys_sort_filter_and_freeze():
    source = Source(lines(*STORY))
    app = Top(source, Clock())
    async with app.run_test(size=(140, 40)) as pilot:
        await shown(pilot, app, "by TTFT/SLO")
        await shown(pilot, app, "policy edf")
        await pilot.press("s", "s")
        assert "by longest" in summary(app)
        assert [row[0] for row in table(app, "requests")] == ["long", "short"]
        await pilot.press("c")
        assert [row[0] for row in table(app, "requests")] == ["short"]
        await pilot.press("c", "c", "space")
        assert len(table(app, "requests")) == 2 and summary(app).endswith("frozen")
        source.parts.put_nowait(lines((5.0, board.Fleet(policy="fcfs"))))
        await shown(pilot, app, "policy fcfs")
        assert len(table(app, "requests")) == 2  # the picture stays
        await pilot.press("space")
        assert table(app, "requests") == [] and table(app, "instances") == []


async def test_ends_first_tokens_and_lost_instances():
    source = Source(lines(*STORY))
    app = Top(source, Clock())
    async with app.run_test(size=(140, 40)) as pilot:
        await shown(pilot, app, "policy edf")
        more = (
            board.FirstToken(id="short", ttft_s=0.75, in_time=False),
            board.ChunkStops(id="long", why="lost"),
            board.InstanceGone(id="p0"),
            board.State(id="long", state="failed"),
            board.Notice(text="look here"),
        )
        part = b"".join(json.dumps(board.line_of(one, 3.0)).encode() + b"\n" for one in more)
        source.parts.put_nowait(part)
        assert "first tokens 0.0% in time" in await shown(pilot, app, "look here")
        [short] = table(app, "requests")
        assert short[-2:] == ["0.75", "1.50"]
        assert [row[0] for row in table(app, "instances")] == ["p1", "p10", "d0"]
        assert table(app, "instances")[0][-1] == ""


async def test_a_stream_that_ends_is_said_to():
    app = Top(Source(None), Clock())
    async with app.run_test() as pilot:
        await shown(pilot, app, "no scheduler at here:1; trying again")


async def test_it_follows_a_real_scheduler():
    async with scheduler() as net:
        await net.worker("p0")
        await net.worker("d0")
        proxy = await net.proxy()
        app = Top(lambda: watch_board(net.address))
        async with app.run_test(size=(140, 40)) as pilot:
            await shown(pilot, app, "policy millrace")
            await proxy.submit(spec("r", 100))
            await shown(pilot, app, "1 requests")
            assert [row[0] for row in table(app, "instances")] == ["p0", "d0"]
            assert table(app, "requests")[0][0] == "r"
            await pilot.press("q")


async def test_without_a_terminal_it_says_so_and_ends():
    status, output = await command.millrace("top")
    assert status == 1
    assert output == ("millrace: top draws on a terminal; `millrace fleet` prints the state once\n")
