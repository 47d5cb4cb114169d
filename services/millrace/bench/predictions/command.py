"""The options of `millrace bench predictions`: errors of predicted first tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass

from millrace.bench.common.options import command as made
from millrace.bench.common.options import option, read_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of the options."""

    lengths: tuple[int, ...] = option(
        tuple(2**power for power in range(4, 16)),
        "--lengths",
        read=read_numbers(),
        metavar="TOKENS,...",
        help="Of prompts.",
    )
    repeats: int = option(8, "--repeats", min=1, help="Prompts of each length.")
    long_tokens: int = option(
        65_536,
        "--long-tokens",
        min=1,
        help="Of a length's prompts together: long ones come less often.",
    )
    busy: int = option(
        0,
        "--busy",
        min=0,
        help="Other processes that compute, in a second pass; 0: no such pass.",
    )
    prefill: int = option(1, "--prefill", min=1, help="Prefill instances.")
    threads: int = option(0, "--threads", min=0, help="Of an instance; 0: half the cores.")
    budget_s: float = option(4.0, "--budget-s", min=0.1, help="Of measuring the model before.")

    def order(self) -> list[int]:
        """Returns the lengths of all prompts of a pass, mixed."""
        found = [
            length
            for length in self.lengths
            for _ in range(min(self.repeats, max(1, self.long_tokens // length)))
        ]
        random.Random(0).shuffle(found)
        return found


command = made(
    Settings,
    """Predicted TTFT against the real one, through a whole stack: the shipped model, any context.

    The model's context is widened to the longest length: its times are right, its words are not.
    """,
    plot="PNG: predicted over real.",
)
