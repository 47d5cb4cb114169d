"""The prompts of `millrace bench chaos`, and how their answers end."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from millrace.bench.chaos.command import RESUMABLE, Settings
from millrace.bench.chaos.other_answers import RESPONSES, OtherAnswer, difference
from millrace.bench.common.lasting_answer import BROKEN, LastingAnswer

#: An answer without an event for so long counts as hung. No fault of a run lasts longer.
SILENCE_S = 120.0
PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
PATHS = {"tool": CHAT, "response": RESPONSES, "background": RESPONSES, "batch": "/v1/batches"}
LINES = 4  # of a batch
SAMPLED = {"temperature": 1, "seed": 7}
WORDS = ("left", "right", "heron", "river", "stone", "why", "tell me", "a story")
TOKENS_OF_A_TURN = 6  # at most, one a character
TOKENS_OF_A_CALL = 200

RIGHT, WRONG, ERROR, CUT, LOST, HUNG = "right", "wrong", "error", "cut", "lost", "hung"
ENDS = (RIGHT, WRONG, ERROR, CUT, LOST, HUNG)
TURNS = {"type": "array", "items": {"enum": ["left", "right"]}, "minItems": 12, "maxItems": 12}
TOOL = {
    "type": "function",
    "function": {
        "name": "walk",
        "parameters": {"type": "object", "properties": {"turns": TURNS}, "required": ["turns"]},
    },
}


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt and how its answer is sampled. `turns`: words that a constrained answer has."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None = None  # None: greedy
    turns: int = 0  # 0: the answer is free
    kind: str = "completion"

    @property
    def path(self) -> str:
        return PATHS.get(self.kind, PATH)

    def reader(self) -> LastingAnswer | OtherAnswer:
        """Returns a new client of this prompt."""
        if self.kind in RESUMABLE:
            return LastingAnswer(self.path, self.body())
        return OtherAnswer(self.path, self.body())

    def body(self) -> dict[str, Any]:
        """The fields of the request."""
        match self.kind:
            case "choices":
                return {**self.completion(), "n": 3, "stream": True, **SAMPLED}
            case "logprobs":
                return {**self.completion(), "logprobs": 2, "stream": True}
            case "beams":
                few = {"use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 6}
                return {"model": "chaos", "prompt": list(self.prompt), **few}
            case "tool":
                room = {"max_tokens": TOKENS_OF_A_CALL}
                return {**self.chat("messages"), **room, "tools": [TOOL], "tool_choice": "required"}
            case "response" | "background":
                room = {"max_output_tokens": self.max_tokens, "stream": True}
                return {**self.chat("input"), **room, "background": self.kind == "background"}
            case "batch":
                return {"endpoint": PATH, "completion_window": "24h", "lines": self.lines()}
            case _:
                return self.completion()

    def chat(self, field: str) -> dict[str, Any]:
        """The fields of a chat, or of a response, whose messages are in `field`."""
        said = " ".join(WORDS[token % len(WORDS)] for token in self.prompt)
        messages = [{"role": "user", "content": said}]
        return {"model": "chaos", field: messages, "temperature": 1, "seed": self.number}

    def lines(self) -> list[dict[str, Any]]:
        """The requests of a batch: beginnings of the prompt."""
        bodies = [
            {**self.completion(), "prompt": list(self.prompt[: 1 + len(self.prompt) // part])}
            for part in range(1, LINES + 1)
        ]
        return [
            {"custom_id": str(number), "method": "POST", "url": PATH, "body": body}
            for number, body in enumerate(bodies)
        ]

    def completion(self) -> dict[str, Any]:
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
    status other than those after which clients ask again; cut: the connection of an answer that
    can't be resumed broke; lost: nobody knows the answer, whose stream can't be resumed; hung:
    silent for `SILENCE_S`. `detail` says more of all but the right ones.
    """

    ended_s: float
    end: str
    detail: str
    read: LastingAnswer | OtherAnswer


def asks(settings: Settings, vocabulary: int) -> list[Ask]:
    """Makes the prompts, of all lengths up to the longest, of every kind of `--answers`. Of four of
    a kind, two are greedy, one is sampled, and one is sampled under a constraint.
    """
    rng = random.Random(f"prompts {settings.seed}")
    made = []
    for number in range(settings.prompts):
        length = rng.randint(4, settings.prompt_tokens)
        prompt = tuple(rng.randrange(vocabulary) for _ in range(length))
        tokens = rng.randint(max(2, settings.output_tokens // 4), settings.output_tokens)
        round_, kind = divmod(number, len(settings.answers))
        turns = max(1, tokens // TOKENS_OF_A_TURN) if round_ % 4 == 3 else 0
        room = max(tokens, TOKENS_OF_A_TURN * turns)
        seed = number if round_ % 2 else None
        made.append(Ask(number, prompt, room, seed, turns, settings.answers[kind]))
    return made


async def stream(
    client: httpx.AsyncClient, ask: Ask, expected: LastingAnswer | OtherAnswer | None = None
) -> Answer:
    """Reads an answer to its end. Without the `expected` one, any complete answer is right."""
    read = ask.reader()
    try:
        await read.read(client, silence_s=SILENCE_S)
        end, detail = _end(read, ask, expected)
    except TimeoutError:
        end, detail = HUNG, f"no event for {SILENCE_S:g} s"
    if end != RIGHT:
        detail = f"{ask.kind} {ask.number}, id {read.chosen_id}: {detail}"
    return Answer(time.monotonic(), end, detail, read)


def _end(
    read: LastingAnswer | OtherAnswer, ask: Ask, expected: LastingAnswer | OtherAnswer | None
) -> tuple[str, str]:
    if read.error:
        if isinstance(read, OtherAnswer) and read.cut:
            return CUT, read.error
        return (LOST if read.status == httpx.codes.NOT_FOUND else ERROR), read.error
    if isinstance(read, OtherAnswer):
        text = difference(read.content, expected.content) if expected else ""
        return (WRONG, text) if text else (RIGHT, "")
    if expected is None:
        wanted: Sequence[int] = ()
        counted = ask.kind == "completion" and not ask.turns
        is_right = not counted or len(read.token_ids) == ask.max_tokens
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
        body = {**ask.completion(), "max_tokens": 2}
        response = await client.post(PATH, json=body, timeout=SILENCE_S)
    except BROKEN:
        return False
    return response.status_code == httpx.codes.OK
