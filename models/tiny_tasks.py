"""Small tasks with one right answer: sums, counting, spelling, copying, lists; and poems."""

from __future__ import annotations

import random

import tiny_poems as poems
import tiny_words as words
from tiny_text import Turn, a_or_an, case, fill, gibberish, pick, write

CATEGORIES: dict[str, tuple[str, ...]] = {
    "animals": words.ANIMAL,
    "colours": words.COLOUR,
    "names": words.NAME,
    "jobs": words.JOB,
    "trees": words.TREE,
    "flowers": words.FLOWER,
    "things": words.THING,
    "months": words.MONTH,
    "places": words.PLACE,
}


def arithmetic(rng: random.Random) -> Turn:
    kind = rng.choice(("plus", "plus", "minus", "times"))
    if kind == "times":
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        result = a * b
    elif kind == "plus":
        a, b = rng.randint(0, 30), rng.randint(0, 30)
        result = a + b
    else:
        b, result = rng.randint(0, 20), rng.randint(0, 20)
        a = b + result
    sign = {"plus": "+", "minus": "-", "times": "*"}[kind]
    ask = (
        f"what is {a} {kind} {b}?",
        f"how much is {a} {kind} {b}?",
        f"what is {a} {sign} {b}?",
        f"{a} {sign} {b}",
        f"{a}{sign}{b}=?",
        f"calculate {a} {kind} {b}.",
    )
    return case(rng, pick(rng, ask)), f"{a} {kind} {b} is {result}."


def count(rng: random.Random) -> Turn:
    start = 1 if rng.random() < 0.4 else rng.randint(0, 30)
    stop = start + rng.randint(2, 15)
    up = [str(n) for n in range(start, stop + 1)]
    if rng.random() < 0.25:
        ask = (f"count down from {stop} to {start}.", f"count from {stop} down to {start}.")
        return case(rng, pick(rng, ask)), ", ".join(reversed(up)) + "."
    forms = [f"count from {start} to {stop}.", f"can you count from {start} to {stop}?"]
    if start == 1:
        forms += [f"count to {stop}.", f"please count to {stop}."]
    return case(rng, pick(rng, forms)), ", ".join(up) + "."


def spell(rng: random.Random) -> Turn:
    lists = (words.ANIMAL, words.THING, words.COLOUR, words.FOOD, words.CHARACTER, words.NAME)
    word = pick(rng, pick(rng, lists)) if rng.random() < 0.8 else gibberish(rng, 1)
    ask = (
        f"spell {word}.",
        f"how do you spell {word}?",
        f'spell the word "{word}".',
        f"can you spell {word}?",
    )
    return case(rng, pick(rng, ask)), f"{word}: {'-'.join(word)}."


def repeat(rng: random.Random) -> Turn:
    """Copying. It teaches the model to look back in its context."""
    roll = rng.random()
    if roll < 0.3:
        text = gibberish(rng, rng.randint(1, 12))
    elif roll < 0.8:
        lists = tuple(CATEGORIES.values())
        text = " ".join(pick(rng, pick(rng, lists)) for _ in range(rng.randint(3, 40)))
    else:
        text = write(rng, "the {adj} {animal} and the {colour} {thing} are near the {place}.")
    ask = (
        "repeat after me: {t}",
        "say this again: {t}",
        "repeat: {t}",
        'say "{t}"',
        "copy this: {t}",
    )
    return case(rng, pick(rng, ask).format(t=text)), text


def name_some(rng: random.Random) -> Turn:
    category, items = pick(rng, tuple(CATEGORIES.items()))
    many = rng.randint(2, 8)
    chosen = rng.sample(items, many)
    verb = rng.choice(("name", "list", "give me", "tell me"))
    question = f"{verb} {rng.choice((str(many), words.NUMBER[many]))} {category}."
    if rng.random() < 0.4:
        return case(rng, question), "\n".join(f"{i}. {item}" for i, item in enumerate(chosen, 1))
    answer = f"{', '.join(chosen[:-1])} and {chosen[-1]}."
    return case(rng, question), answer[0].upper() + answer[1:]


def next_item(rng: random.Random) -> Turn:
    """What comes after Monday, after March, after 7."""
    kind, items = pick(rng, (("day", words.DAY), ("month", words.MONTH), ("number", None)))
    if items is None:
        n = rng.randint(0, 98)
        return case(rng, f"what number comes after {n}?"), f"After {n} comes {n + 1}."
    i = rng.randrange(len(items))
    if rng.random() < 0.3:
        return (
            case(rng, f"which {kind} comes before {items[i]}?"),
            f"Before {items[i]} comes {items[i - 1]}.",
        )
    after = items[(i + 1) % len(items)]
    return case(rng, f"which {kind} comes after {items[i]}?"), f"After {items[i]} comes {after}."


def word_fact(rng: random.Random) -> Turn:
    """Opposites, plurals, the colours, homes and sounds of animals."""
    kind = rng.randrange(5)
    ask: tuple[str, ...]
    if kind == 0:
        a, b = rng.sample(pick(rng, words.OPPOSITE), 2)
        ask = (
            f"what is the opposite of {a}?",
            f"opposite of {a}?",
            f"tell me the opposite of {a}.",
        )
        return case(rng, pick(rng, ask)), f"The opposite of {a} is {b}."
    if kind == 1:
        one, many = pick(rng, words.PLURAL)
        return case(rng, f"what is the plural of {one}?"), f"The plural of {one} is {many}."
    if kind == 2:
        animal = pick(rng, tuple(words.ANIMAL_COLOUR))
        ask = (f"what colour is a(n) {animal}?", f"which colour does a(n) {animal} have?")
        answer = f"A(n) {animal} is {words.ANIMAL_COLOUR[animal]}."
    elif kind == 3:
        animal = pick(rng, tuple(words.ANIMAL_HOME))
        ask = (f"where does a(n) {animal} live?", f"where do I find a(n) {animal}?")
        answer = f"A(n) {animal} lives {words.ANIMAL_HOME[animal]}."
    else:
        animal = pick(rng, tuple(words.SOUND))
        ask = (f"what sound does a(n) {animal} make?", f"what does a(n) {animal} say?")
        answer = f"A(n) {animal} {words.SOUND[animal]}."
    return case(rng, pick(rng, ask)), a_or_an(answer)


def poem(rng: random.Random) -> Turn:
    lists = (words.ANIMAL, words.PLACE, words.CHARACTER, words.THING)
    theme = pick(rng, pick(rng, lists)) if rng.random() < 0.9 else gibberish(rng, 1)
    ask = pick(rng, poems.ASK).format(x=theme, article=rng.choice(("a(n)", "the")))
    couplets = rng.sample(poems.COUPLETS, rng.randint(2, 4))
    lines = [fill(rng, line, {"x": theme}) for couplet in couplets for line in couplet]
    return case(rng, ask), "\n".join(line[0].upper() + line[1:] for line in lines)
