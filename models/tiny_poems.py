"""Couplets for the small model's poems: `{x}` is the theme that the user asked for."""

from __future__ import annotations

COUPLETS: tuple[tuple[str, str], ...] = (
    ("the {x} is waiting by the mill,", "the {weather} is gone, the air is still."),
    ("the river runs, the river sings,", "and tells the {x} of {colour} things."),
    ("a(n) {adj} {animal} passes by,", "beneath a wide and {colour} sky."),
    ("the {x} was here before the day,", "and will not quickly go away."),
    ("we sit together, you and I,", "and watch the {x} and the sky."),
    ("the {season} comes, the {season} goes,", "and where the {x} is, no one knows."),
    ("the {tree} is tall, the path is long,", "the {x} has heard the water's song."),
    ("so close the door and light the fire,", "the {x} has all that hearts desire."),
    ("the night is dark, the night is deep,", "the {animal} and the {x} now sleep."),
    ("a(n) {colour} light, a(n) {adj} word,", "the sweetest thing the {x} has heard."),
    ("slow is the wheel and old the stone,", "the {x} is never quite alone."),
    ("the {flower} opens in the sun,", "the {x} will rest when work is done."),
)
ASK = (
    "write a poem about {article} {x}.",
    "write a short poem about the {x}.",
    "can you write a poem about the {x}?",
    "a poem about {article} {x}, please.",
    "tell me a poem about the {x}.",
    "please write a few lines about {article} {x}.",
    "write a haiku about the {x}.",
)
