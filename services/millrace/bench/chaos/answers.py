"""Streams prompts from a stack and sorts the ends of the answers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from millrace.bench.chaos.command import Settings
from millrace.event_lines import event_lines

#: An answer without an event for so long counts as hung. No fault of a run lasts longer.
SILENCE_S = 120.0
#: The pause of a client after a refusal without Retry-After, in seconds.
REFUSED_PAUSE_S = 0.5

RIGHT, WRONG, ERROR, REFUSED, CUT, HUNG = "right", "wrong", "error", "refused", "cut", "hung"
ENDS = (RIGHT, WRONG, ERROR, REFUSED, CUT, HUNG)


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt and how its answer is sampled."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None  # None: greedy

    def body(self) -> dict[str, Any]:
        sampled = {"temperature": 0} if self.seed is None else {"temperature": 1, "seed": self.seed}
        return {
            "model": "chaos",
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **sampled,
        }


@dataclass(slots=True)
class Answer:
    """How an answer ended; times are seconds of `time.monotonic`.

    `end`: right; wrong tokens, or too few of them without an error; error: an error event ended the
    stream; refused: 429 or 503, before any token; cut: the connection broke; hung: it was silent.
    """

    ask: int
    sent_s: float
    end: str = ""
    detail: str = ""
    ended_s: float = 0.0
    longest_gap_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    retry_after_s: float = REFUSED_PAUSE_S


def asks(settings: Settings, vocabulary: int) -> list[Ask]:
    """Makes the prompts: of all lengths up to the longest; every second one is sampled."""
    rng = random.Random(f"prompts {settings.seed}")
    made = []
    for number in range(settings.prompts):
        length = rng.randint(4, settings.prompt_tokens)
        prompt = tuple(rng.randrange(vocabulary) for _ in range(length))
        tokens = rng.randint(max(2, settings.output_tokens // 4), settings.output_tokens)
        made.append(Ask(number, prompt, tokens, number if number % 2 else None))
    return made


async def stream(client: httpx.AsyncClient, ask: Ask, expected: Sequence[int] | None) -> Answer:
    """Asks and reads to the end. Without `expected` tokens, any complete answer is right."""
    answer = Answer(ask.number, time.monotonic())
    try:
        await _read(client, ask, answer)
    except TimeoutError:
        answer.end, answer.detail = HUNG, f"no event for {SILENCE_S:g} s"
    except httpx.HTTPError as error:
        answer.end, answer.detail = CUT, repr(error)
    answer.ended_s = time.monotonic()
    if not answer.end:
        found, wanted = answer.tokens, ask.max_tokens
        answer.end = RIGHT if len(found) == wanted and expected in (None, found) else WRONG
        if answer.end == WRONG:
            answer.detail = _difference(found, expected or [], wanted)
    return answer


async def _read(client: httpx.AsyncClient, ask: Ask, answer: Answer) -> None:
    last_s = answer.sent_s
    async with client.stream("POST", "/v1/completions", json=ask.body()) as response:
        if response.status_code != httpx.codes.OK:
            body = (await response.aread()).decode(errors="replace")
            refused = response.status_code in (429, 503)
            answer.end, answer.detail = (REFUSED if refused else ERROR), body
            answer.retry_after_s = float(response.headers.get("retry-after", REFUSED_PAUSE_S))
            return
        lines = event_lines(response)
        while True:
            async with asyncio.timeout(SILENCE_S):
                line = await anext(lines, None)
            if line is None or line == "data: [DONE]":
                return
            if not line.startswith("data: "):
                continue
            event = orjson.loads(line[len("data: ") :])
            if "error" in event:
                answer.end, answer.detail = ERROR, event["error"]["message"]
                return
            now_s = time.monotonic()
            answer.longest_gap_s = max(answer.longest_gap_s, now_s - last_s)
            last_s = now_s
            for choice in event["choices"]:
                answer.tokens += choice.get("token_ids") or ()


def _difference(found: Sequence[int], expected: Sequence[int], wanted: int) -> str:
    same = 0
    for one, other in zip(found, expected, strict=False):
        if one != other:
            break
        same += 1
    return f"{len(found)} tokens of {wanted}; the first {same} are right"
