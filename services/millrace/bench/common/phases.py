"""What a load with phases consists of. Imports no engine, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of the load: its requests are of a class with its name. `load` is a share of the rate
    that the benchmark measures.
    """

    name: str
    load: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Prompts are uniform between half of `prompt_tokens` and one and a half times as many."""

    prompt_tokens: int
    output_tokens: int
