"""The prompts of `millrace bench chaos`, and how their answers end."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from millrace.bench.chaos.command import Settings
from millrace.bench.common.lasting_answer import LastingAnswer

#: An answer without an event for so long counts as hung. No fault of a run lasts longer.
SILENCE_S = 120.0
PATH = "/v1/completions"
TOKENS_OF_A_TURN = 6  # at most, one a character

RIGHT, WRONG, ERROR, LOST, HUNG = "right", "wrong", "error", "lost", "hung"
ENDS = (RIGHT, WRONG, ERROR, LOST, HUNG)


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt and how its answer is sampled. `turns`: words that a constrained answer has."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None = None  # None: greedy
    turns: int = 0  # 0: the answer is free

    def body(self) -> dict[str, Any]:
        """The fields of a completion."""
        body: dict[str, Any] = {
            "model": "chaos",
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0 if self.seed is None else 1,
            "return_token_ids": True,
        }
        if self.seed is not None:
            body["seed"] = self.seed
        if not self.turns:
            return {**body, "ignore_eos": True}
        return {**body, "structured_outputs": {"regex": f"((left|right) ){{{self.turns}}}"}}


@dataclass(slots=True)
class Answer:
    """How an answer ended; `ended_s` is of `time.monotonic`.

    `end`: right; wrong tokens, or another number of them without an error; error: an event or a
    status other than those after which clients ask again; lost: the stream could not be resumed;
    hung: silent for `SILENCE_S`. `detail` says more of all but the right ones.
    """

    ended_s: float
    end: str
    detail: str
    read: LastingAnswer


def asks(settings: Settings, vocabulary: int) -> list[Ask]:
    """Makes the prompts, of all lengths up to the longest. Of four, two are greedy, one is sampled,
    and one is sampled under a constraint.
    """
    rng = random.Random(f"prompts {settings.seed}")
    made = []
    for number in range(settings.prompts):
        length = rng.randint(4, settings.prompt_tokens)
        prompt = tuple(rng.randrange(vocabulary) for _ in range(length))
        tokens = rng.randint(max(2, settings.output_tokens // 4), settings.output_tokens)
        turns = max(1, tokens // TOKENS_OF_A_TURN) if number % 4 == 3 else 0
        room = max(tokens, TOKENS_OF_A_TURN * turns)
        made.append(Ask(number, prompt, room, number if number % 2 else None, turns))
    return made


async def stream(
    client: httpx.AsyncClient, ask: Ask, expected: LastingAnswer | None = None
) -> Answer:
    """Reads an answer to its end. Without the `expected` one, any complete answer is right."""
    read = LastingAnswer(PATH, ask.body())
    try:
        await read.read(client, silence_s=SILENCE_S)
        end, detail = _end(read, ask, expected)
    except TimeoutError:
        end, detail = HUNG, f"no event for {SILENCE_S:g} s"
    if end != RIGHT:
        detail = f"prompt {ask.number}, id {read.chosen_id}: {detail}"
    return Answer(time.monotonic(), end, detail, read)


def _end(read: LastingAnswer, ask: Ask, expected: LastingAnswer | None) -> tuple[str, str]:
    if read.error:
        return (LOST if read.status == httpx.codes.NOT_FOUND else ERROR), read.error
    if expected is None:
        wanted: Sequence[int] = ()
        is_right = ask.turns > 0 or len(read.token_ids) == ask.max_tokens
    else:
        wanted, is_right = expected.token_ids, read.content == expected.content
    return (RIGHT, "") if is_right else (WRONG, _difference(read.token_ids, wanted, read.finish))


def _difference(found: Sequence[int], wanted: Sequence[int], finish: str) -> str:
    pairs = enumerate(zip(found, wanted, strict=False))
    same = next((at for at, (one, other) in pairs if one != other), min(len(found), len(wanted)))
    return f"{len(found)} tokens of {len(wanted)}, finish {finish!r}; the first {same} are right"


async def is_answered(client: httpx.AsyncClient, ask: Ask) -> bool:
    """Whether a short answer to a prompt comes at once, without another try."""
    try:
        body = {**ask.body(), "max_tokens": 2}
        response = await client.post(PATH, json=body, timeout=SILENCE_S)
    except httpx.HTTPError:
        return False
    return response.status_code == httpx.codes.OK
