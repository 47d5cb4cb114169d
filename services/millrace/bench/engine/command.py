"""The options of `millrace bench engine`: the engine's speed. `run.py` measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.bench.common.models import LLAMA_100M
from millrace.bench.common.options import DTYPES, option, read_names, read_numbers
from millrace.bench.common.options import command as made

OTHERS = ("transformers", "llama.cpp")
#: Millrace with another `engine.deterministic` than `auto`.
DETERMINISM = {"deterministic": "on", "fast": "off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The cases to measure: every prefill length, and every decode batch at every context
    length.
    """

    against: Sequence[str] = option(
        OTHERS,
        "--against",
        read=read_names(*OTHERS, *DETERMINISM),
        metavar="ENGINES",
        help="Comma-separated: transformers, llama.cpp, deterministic and fast "
        "(Millrace with engine.deterministic=on and off).",
    )
    dtypes: Sequence[str] = option(
        DTYPES, "--dtypes", read=read_names(*DTYPES), help="Comma-separated: float32, bfloat16."
    )
    prefill_tokens: Sequence[int] = option(
        (512, 2048, 8192),
        "--prefill",
        read=read_numbers(),
        metavar="TOKENS",
        help="Prompt lengths, comma-separated.",
    )
    batches: Sequence[int] = option(
        (1, 8),
        "--batches",
        read=read_numbers(),
        metavar="SIZES",
        help="Decode batches, comma-separated.",
    )
    contexts: Sequence[int] = option(
        (512, 2048),
        "--contexts",
        read=read_numbers(),
        metavar="TOKENS",
        help="Decode contexts, comma-separated.",
    )
    steps: int = option(24, "--steps", min=1, help="Decode steps a repetition.")
    repeats: int = option(3, "--repeats", min=1, help="Repetitions at most; medians are reported.")
    budget_s: float = option(
        5.0,
        "--budget-s",
        min=0.0,
        help="Seconds an engine may repeat a case for; once it does.",
    )
    threads: int | None = option(
        None, "--threads", kind=int | None, min=1, help="Default: as many as torch takes."
    )
    model: Mapping[str, Any] = field(default_factory=lambda: LLAMA_100M)


command = made(
    Settings,
    "Engine speed on the CPU: prefill and decode tokens/s beside other engines, in one run.",
    plot="Write the ratios as a PNG.",
)
