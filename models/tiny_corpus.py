"""Generate the small model's training text: an endless, seeded stream of short and long documents.

A document is a list of segments. Each has a loss weight: the words that the model should say count
in full, a user's words count little, because most of them are free choices.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import tiny_facts as facts
import tiny_tasks as tasks
from tiny_reading import long_reading, reading
from tiny_story import story_plain, story_reading, story_talk, story_turn
from tiny_text import Document, Segment, Turn, case, chat, gibberish, pick
from tiny_words import ANY_NOUN

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are a friendly assistant.",
    "Answer in simple words.",
    "You are Millrace's small demonstration model.",
    "Be kind and short.",
    "You are a storyteller.",
)
ASK_FACT = (
    "what is {x}?",
    "what is {x}",
    "explain {x}.",
    "what does {x} mean?",
    "tell me about {x}.",
    "can you explain {x}?",
    "please explain {x} in simple words.",
    "what do you know about {x}?",
)
ASK_UNKNOWN = (
    "what is {x}?",
    "tell me about {x}.",
    "explain {x}.",
    "can you help me with {x}?",
    "what do you think about {x}?",
    "how does {x} work?",
    "I have a question about {x}.",
    "write an essay about {x}.",
    "why is {x} important?",
    "give me advice on {x}.",
)


def serving_turn(rng: random.Random) -> Turn:
    subject, answer = pick(rng, facts.SERVING)
    return case(rng, pick(rng, ASK_FACT).format(x=subject)), answer


def world_turn(rng: random.Random) -> Turn:
    questions, answer = pick(rng, facts.WORLD)
    return case(rng, pick(rng, questions)), answer


def unknown_turn(rng: random.Random) -> Turn:
    topic = pick(rng, ANY_NOUN) if rng.random() < 0.6 else gibberish(rng, rng.randint(1, 2))
    return case(rng, pick(rng, ASK_UNKNOWN).format(x=topic)), pick(rng, facts.UNKNOWN).format(
        topic=topic
    )


def pasted_turn(rng: random.Random) -> Turn:
    """A text of unknown words without any question."""
    words = gibberish(rng, rng.randint(8, 120))
    return words, "Thank you for the text. What would you like to know about it?"


def small_talk(rng: random.Random) -> Turn:
    pairs = (
        (facts.GREETINGS, facts.GREETING_ANSWERS),
        (facts.WHO_QUESTIONS, facts.WHO),
        (facts.CAN_QUESTIONS, facts.CAN),
        (facts.THANKS, facts.THANKS_ANSWERS),
        (facts.BYES, facts.BYE_ANSWERS),
    )
    questions, answers = rng.choices(pairs, weights=(3, 3, 2, 1, 1))[0]
    return case(rng, pick(rng, questions)), pick(rng, answers)


TURNS: tuple[tuple[float, Callable[[random.Random], Turn]], ...] = (
    (0.08, story_turn),
    (0.11, small_talk),
    (0.16, serving_turn),
    (0.10, world_turn),
    (0.07, unknown_turn),
    (0.01, pasted_turn),
    (0.05, tasks.poem),
    (0.10, tasks.arithmetic),
    (0.08, tasks.count),
    (0.06, tasks.spell),
    (0.16, tasks.repeat),
    (0.06, tasks.name_some),
    (0.06, tasks.next_item),
    (0.08, tasks.word_fact),
)


def any_turn(rng: random.Random) -> Turn:
    weights = [weight for weight, _ in TURNS]
    return rng.choices([make for _, make in TURNS], weights=weights)[0](rng)


def mixed_chat(rng: random.Random) -> Document:
    count = rng.choices((1, 2, 3, 4), weights=(60, 20, 12, 8))[0]
    system = pick(rng, SYSTEMS) if rng.random() < 0.25 else None
    return chat([any_turn(rng) for _ in range(count)], system=system)


DOCUMENTS: tuple[tuple[float, Callable[[random.Random], Document]], ...] = (
    (0.52, mixed_chat),
    (0.03, story_plain),
    (0.04, story_talk),
    (0.06, story_reading),
    (0.35, reading),
)


def documents(
    rng: random.Random, *, long_tokens: int = 0, long_share: float = 0.0
) -> Iterator[Document]:
    """Documents without end; a share `long_share` are texts of up to about `long_tokens`."""
    makers = [make for _, make in DOCUMENTS]
    weights = [weight for weight, _ in DOCUMENTS]
    while True:
        if rng.random() < long_share:
            yield long_reading(rng, rng.randint(long_tokens // 4, long_tokens))
        else:
            yield rng.choices(makers, weights=weights)[0](rng)


def plain(document: Sequence[Segment]) -> str:
    """The document as one string, with its special tokens spelled out."""
    return "".join(segment.text for segment in document)


def vocabulary(seed: int, count: int = 4000) -> set[str]:
    """The lower-case words in `count` documents: what a trained model is expected to use."""
    rng = random.Random(seed)
    stream = documents(rng)
    words: set[str] = set()
    for _ in range(count):
        text = plain(next(stream)).replace("<|", " <").replace("|>", "> ")
        words.update(word.strip(".,!?:;\"'()-").lower() for word in text.split())
    return words
