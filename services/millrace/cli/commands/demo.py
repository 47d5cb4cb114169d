"""`millrace demo`: real prefill/decode disaggregation on this machine, in one command."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from millrace.cli.commands.chat import delta_text, served_model, stream_chat
from millrace.cli.process import usable_devices
from millrace.core.config import Config
from millrace.local.options import StackOptions
from millrace.local.terminal import lasting
from millrace.local.up import start_with_progress
from millrace.telemetry.trace import Waterfall

QUESTIONS = (
    "Tell me a story about a heron.",
    "Who are you?",
    "Explain continuous batching.",
    "What is prefill?",
)
DOCUMENT_SENTENCES = 420
LONG_QUESTION = "What colour is the key for the north gate?"


@dataclass(slots=True)
class Answer:
    """One request of the demo as it is shown."""

    title: str
    prompt: str
    text: str = ""
    ttft_ms: float | None = None
    spans: dict[str, Any] = field(default_factory=dict)
    done: bool = False

    @property
    def first_token(self) -> str:
        return "…" if self.ttft_ms is None else f"{self.ttft_ms:.0f} ms"


async def run(model: str) -> None:
    """Runs the demo. Raises MillraceError when the stack does not start or a request fails."""
    console = Console(file=lasting(sys.stdout))
    devices = usable_devices(Config(), "")
    options = StackOptions(model=model, port=0, devices=devices, share_devices=True)
    stack = await start_with_progress(options, console)
    try:
        names = ", ".join(stack.services)
        console.print(f"Running: {names}, and a private Redis. Gateway: {stack.url}\n")
        answers = [Answer("long document", document())]
        answers += [Answer(f"chat {i}", q) for i, q in enumerate(QUESTIONS, 1)]
        async with httpx.AsyncClient(base_url=stack.url, timeout=None) as client:
            await _ask_all(client, answers, console)
        for answer in answers:
            console.rule(f"{answer.title}: time to first token {answer.first_token}")
            console.print(
                Waterfall.from_dict(answer.spans).render(console.width),
                markup=False,
                highlight=False,
            )
    finally:
        with console.status("stopping"):
            await stack.stop()
    console.print("\nStopped clean. `make up` keeps a stack running.")


def document() -> str:
    """Returns a long document with one hidden fact, and a question about the fact."""
    sentences = [
        f"On day {day} the miller ground {3 + day % 7} sacks of grain by the river."
        for day in range(1, DOCUMENT_SENTENCES)
    ]
    sentences.insert(len(sentences) // 3, "The key for the north gate is amber.")
    return " ".join(sentences) + f" {LONG_QUESTION}"


async def _ask_all(client: httpx.AsyncClient, answers: list[Answer], console: Console) -> None:
    model = await served_model(client)
    with Live(_table(answers), console=console, refresh_per_second=8) as live:
        tasks = [asyncio.create_task(_ask(client, model, answer)) for answer in answers]
        while pending := [t for t in tasks if not t.done()]:
            await asyncio.wait(pending, timeout=0.1)
            live.update(_table(answers))
        live.update(_table(answers))
    await asyncio.gather(*tasks)


async def _ask(client: httpx.AsyncClient, model: str, answer: Answer) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": answer.prompt}],
        "max_tokens": 48,
        "temperature": 0,
    }
    start_s = time.perf_counter()
    async for chunk in stream_chat(client, body):
        piece = delta_text(chunk)
        if piece and answer.ttft_ms is None:
            answer.ttft_ms = (time.perf_counter() - start_s) * 1e3
        answer.text += piece
        answer.spans = chunk.get("millrace", answer.spans)
    answer.done = True


def _table(answers: list[Answer]) -> Table:
    table = Table(show_lines=True)
    table.add_column("request")
    table.add_column("first token", justify="right")
    table.add_column("prompt, then answer", ratio=1)
    for a in answers:
        shown = a.prompt if len(a.prompt) < 90 else f"{a.prompt[:60]} … {a.prompt[-50:]}"
        table.add_row(a.title, a.first_token, f"[dim]{shown}[/dim]\n{a.text}")
    return table
