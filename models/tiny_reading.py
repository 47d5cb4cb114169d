"""Reading: texts of facts among plain sentences, with questions at the end (or at the start)."""

from __future__ import annotations

import random

import tiny_grammar as grammar
from tiny_text import Document, Turn, case, chat, fill, gibberish, pick, sentence_case, write
from tiny_words import PLURAL, SIDE

ASK = (
    ("Read the text and answer the question.\n\n", "\n\nQuestion: "),
    ("Read this document.\n\n", "\n\n"),
    ("", "\n\n"),
    ("", " "),
    ("", "\n\nQuestion: "),
    ("Here is a text.\n\n", "\n\nUse the text to answer: "),
    ("Text:\n", "\n\nQuestion: "),
)
TOKENS_A_SENTENCE = 13
DIARY_SHARE = 0.15


def _fact(rng: random.Random) -> tuple[str, str, str]:
    """One fact: (sentence, question, answer)."""
    sentence, questions, answers = pick(rng, grammar.FACTS)
    names = ("adj", "animal", "colour", "flower", "food", "job", "month", "num", "place", "someone")
    bound: dict[str, str] = {
        name: fill(rng, "{" + name + "}", {}) for name in (*names, "thing", "thingadj", "weekday")
    }
    bound |= {
        "side": pick(rng, SIDE),
        "gate": pick(rng, grammar.GATES),
        "boat": pick(rng, grammar.BOATS),
        "room": str(rng.randint(2, 99)),
        "code": str(rng.randint(1000, 9999)),
        "plural": pick(rng, PLURAL)[1],
        "word": gibberish(rng, 1) if rng.random() < 0.5 else fill(rng, "{thing}", {}),
    }
    return (
        sentence_case(fill(rng, sentence, bound)),
        fill(rng, pick(rng, questions), bound),
        sentence_case(fill(rng, pick(rng, answers), bound)),
    )


def _fillers(rng: random.Random, count: int) -> list[str]:
    return [write(rng, pick(rng, grammar.FILLER)) for _ in range(count)]


def _diary(rng: random.Random, count: int) -> list[str]:
    """Lines that differ only in their numbers."""
    template = pick(rng, grammar.DIARY)
    for slot in ("job", "many", "place", "food", "weather"):
        template = template.replace("{" + slot + "}", fill(rng, "{" + slot + "}", {}))
    return [write(rng, template, {"day": str(day)}) for day in range(1, count + 1)]


def _mix(rng: random.Random, facts: list[str], rest: list[str]) -> list[str]:
    """Both lists in one, in a random order that keeps each list's own order."""
    from_facts = [True] * len(facts) + [False] * len(rest)
    rng.shuffle(from_facts)
    facts_left, rest_left = iter(facts), iter(rest)
    return [next(facts_left if fact else rest_left) for fact in from_facts]


def text_with_facts(
    rng: random.Random, *, facts: int, fillers: int, paragraph: int
) -> tuple[str, list[Turn]]:
    """A text of `facts` facts among `fillers` other sentences, and one question for each fact."""
    found: dict[str, tuple[str, str, str]] = {}
    for _ in range(facts * 3):
        fact = _fact(rng)
        # A fact is known by its sentence without the last word, so that no two contradict.
        found.setdefault(fact[0].rsplit(" ", 1)[0], fact)
        if len(found) == facts:
            break
    sentences = [fact[0] for fact in found.values()]
    rest = _diary(rng, fillers) if rng.random() < DIARY_SHARE else _fillers(rng, fillers)
    sentences = _mix(rng, sentences, rest)
    paragraphs = [
        " ".join(sentences[i : i + paragraph]) for i in range(0, len(sentences), paragraph)
    ]
    return "\n\n".join(paragraphs), [(case(rng, q), a) for _, q, a in found.values()]


def _ask(rng: random.Random, text: str, turns: list[Turn]) -> Document:
    before, between = pick(rng, ASK)
    question, answer = turns[0]
    if rng.random() < 0.12:
        return chat([(f"{question}\n\n{text}", answer), *turns[1:]])
    return chat([(before + text + between + question, answer), *turns[1:]])


def reading(rng: random.Random) -> Document:
    """A short text (up to about 350 tokens) and one to six questions; some have no answer in it."""
    facts = rng.randint(1, 10)
    text, turns = text_with_facts(
        rng, facts=facts, fillers=rng.randint(0, 10), paragraph=rng.randint(3, 12)
    )
    rng.shuffle(turns)
    turns = turns[: rng.randint(1, 6)]
    if rng.random() < 0.08:
        _, question, answer = _fact(rng)
        if answer not in text:
            turns.insert(
                rng.randrange(len(turns) + 1), (case(rng, question), "The text does not say.")
            )
    return _ask(rng, text, turns)


def long_reading(rng: random.Random, tokens: int) -> Document:
    """A text of about `tokens` tokens and several questions, so that far facts count too."""
    sentences = max(8, tokens // TOKENS_A_SENTENCE)
    facts = max(4, round(sentences * rng.uniform(0.05, 0.5)))
    text, turns = text_with_facts(
        rng, facts=facts, fillers=max(0, sentences - facts), paragraph=rng.randint(4, 20)
    )
    rng.shuffle(turns)
    return _ask(rng, text, turns[: min(len(turns), 3 + tokens // 150, 24)])
