"""Stories: a hero wants something, meets trouble and a friend, finds it, goes home."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import tiny_grammar as grammar
from tiny_text import BOS, EOS, Document, Segment, Turn, case, chat, fill, gibberish, pick, write
from tiny_words import (
    ADJ,
    ANIMAL,
    BUILDING,
    CHARACTER,
    COLOUR,
    FEMALE,
    JOB,
    NAME,
    PLACE,
    THING,
    THING_ADJ,
)

ASK = (
    "tell me a story about {theme}.",
    "tell me a story about {theme}.",
    "tell me a short story about {theme}.",
    "write a story about {theme}.",
    "write a short story about {theme}.",
    "can you tell me a story about {theme}?",
    "please tell me a story about {theme}.",
    "I would like a story about {theme}.",
    "a story about {theme}, please.",
    "make up a tale about {theme}.",
)
ASK_ANY = (
    "tell me a story.",
    "tell me a story.",
    "write a story.",
    "write me a short story.",
    "can you tell me a story?",
    "tell me something.",
    "tell me something nice.",
    "another story, please.",
    "please tell me a bedtime story.",
    "once upon a time",
)
HER = ("queen", "princess", "girl", "witch", "hen")
HIS = ("king", "prince", "boy", "knight", "wizard", "pirate", "giant", "rooster")
PEOPLE = (*HER, *HIS, *JOB, "child", "astronaut", "scientist", "programmer")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cast:
    """Who and what a story is about."""

    kind: str
    adj: str
    name: str
    friend: str
    friend_adj: str
    goal: str  # without article, e.g. "silver bell"
    home: str
    far: str


def _kind(rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.06:
        return gibberish(rng, 1)
    return pick(rng, ANIMAL if roll < 0.5 else CHARACTER if roll < 0.8 else JOB)


def _fits(kind: str, name: str) -> bool:
    return name in FEMALE if kind in HER else name not in FEMALE if kind in HIS else True


def cast(rng: random.Random) -> Cast:
    home = pick(rng, PLACE)
    kind = _kind(rng)
    friend = pick(rng, [a for a in ANIMAL if a != kind])
    return Cast(
        kind=kind,
        adj=pick(rng, ADJ),
        name=pick(rng, [n for n in NAME if _fits(kind, n)]),
        friend=friend,
        friend_adj=pick(rng, ADJ),
        goal=f"{pick(rng, COLOUR if rng.random() < 0.5 else THING_ADJ)} {pick(rng, THING)}",
        home=home,
        far=pick(rng, [place for place in BUILDING if place != home]),
    )


def _bindings(who: Cast, *, named: bool) -> dict[str, str | Sequence[str]]:
    the_kind = f"the {who.kind}"
    possessive = "its"
    if who.kind in PEOPLE:
        possessive = "her" if who.name in FEMALE else "his"
    return {
        "herokind": who.kind,
        "heroadj": who.adj,
        "name": who.name,
        "hero": (the_kind, who.name) if named else the_kind,
        "his": possessive,
        "friend": f"the {who.friend}",
        "friendkind": who.friend,
        "friendadj": who.friend_adj,
        "goal": f"a(n) {who.goal}",
        "goalthe": f"the {who.goal}",
        "home": who.home,
        "far": who.far,
    }


def tell(rng: random.Random, who: Cast, *, chapters: int = 1) -> list[str]:
    """The story's paragraphs. Every chapter repeats the search with another friend and goal."""
    lines = [write(rng, pick(rng, grammar.OPENING), _bindings(who, named=False))]
    lines.append(write(rng, pick(rng, grammar.NAMING), _bindings(who, named=False)))
    paragraphs: list[str] = []
    for chapter in range(chapters):
        if chapter > 0:
            other = cast(rng)
            who = dataclasses.replace(
                who,
                friend=other.friend,
                friend_adj=other.friend_adj,
                goal=other.goal,
                far=other.far,
            )
        bound = _bindings(who, named=True)
        for beat, most in (
            (grammar.SCENE, 1),
            (grammar.WANT, 1),
            (grammar.SETOUT, 2),
            (grammar.TROUBLE, 1),
            (grammar.MEET, 1),
            (grammar.TALK, 2),
            (grammar.EFFORT, 2),
            (grammar.SCENE, 1),
            (grammar.FIND, 1),
            (grammar.RETURN, 1),
        ):
            optional = beat in (grammar.SCENE, grammar.EFFORT) or most > 1
            count = rng.randint(0 if beat is grammar.SCENE else 1, most) if optional else 1
            lines += [write(rng, t, bound) for t in rng.sample(beat, count)]
        paragraphs.append(" ".join(lines))
        lines = []
    closing = write(rng, pick(rng, grammar.CLOSING), _bindings(who, named=True))
    paragraphs[-1] += " " + closing
    return paragraphs


def _theme(rng: random.Random, who: Cast) -> str:
    themes = (
        f"a(n) {who.kind}",
        f"a(n) {who.kind}",
        f"the {who.kind}",
        f"a(n) {who.adj} {who.kind}",
        f"a(n) {who.kind} called {who.name}",
        f"{who.name} the {who.kind}",
        f"a(n) {who.kind} and a(n) {who.friend}",
        f"a(n) {who.kind} who looks for a(n) {who.goal}",
        f"a(n) {who.kind} near the {who.home}",
        f"a(n) {who.goal}",
        f"the {who.home}",
    )
    return pick(rng, themes)


def _story_turn(rng: random.Random, who: Cast) -> Turn:
    if rng.random() < 0.2:
        question = pick(rng, ASK_ANY)
    else:
        question = pick(rng, ASK).format(theme=_theme(rng, who))
    chapters = 1
    if rng.random() < 0.12:
        chapters = rng.randint(2, 4)
        question = question.replace("short ", "").replace(" story", " long story", 1)
        if "long" not in question:
            chapters = 1
    return case(rng, question), "\n\n".join(tell(rng, who, chapters=chapters))


def story_turn(rng: random.Random) -> Turn:
    """A request for a story and the story."""
    return _story_turn(rng, cast(rng))


def _questions(rng: random.Random, who: Cast) -> list[Turn]:
    turns = [
        (f"what is the name of the {who.kind}?", f"The {who.kind} is called {who.name}."),
        (f"who is {who.name}?", f"{who.name} is a(n) {who.adj} {who.kind}."),
        (f"what did the {who.kind} look for?", f"The {who.kind} looked for a(n) {who.goal}."),
        (f"whom did {who.name} meet?", f"{who.name} met a(n) {who.friend_adj} {who.friend}."),
        (f"where did the {who.kind} live?", f"The {who.kind} lived near the {who.home}."),
        ("who is the story about?", f"The story is about a(n) {who.kind} called {who.name}."),
        (
            "summarise the story.",
            f"A(n) {who.adj} {who.kind} called {who.name} lived near the {who.home}, looked for "
            f"a(n) {who.goal}, and met a(n) {who.friend_adj} {who.friend}.",
        ),
    ]
    first, second = who.goal.split(maxsplit=1)
    if first in COLOUR:
        turns.append((f"what colour is the {second}?", f"The {second} is {first}."))
    rng.shuffle(turns)
    return [(case(rng, q), fill(rng, a, {})) for q, a in turns]


def story_talk(rng: random.Random) -> Document:
    """The model tells a story, then the user asks about it."""
    who = cast(rng)
    return chat([_story_turn(rng, who), *_questions(rng, who)[: rng.randint(1, 4)]])


def story_reading(rng: random.Random) -> Document:
    """The user gives a story and asks about it."""
    who = cast(rng)
    text = "\n\n".join(tell(rng, who))
    turns = _questions(rng, who)[: rng.randint(2, 5)]
    first, answer = turns[0]
    opening = pick(
        rng, ("Read this story.\n\n", "Here is a story.\n\n", "", "Read the text and answer.\n\n")
    )
    return chat([(f"{opening}{text}\n\n{first}", answer), *turns[1:]])


def story_plain(rng: random.Random) -> Document:
    """A story with no chat around it, for plain completions."""
    paragraphs = tell(rng, cast(rng), chapters=rng.choice((1, 1, 2)))
    return [Segment(BOS, 0.0), Segment("\n\n".join(paragraphs) + EOS, 1.0)]
