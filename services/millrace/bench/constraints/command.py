"""The options of `millrace bench constraints`: what masks cost decode. `run.py` measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.bench.common.models import LLAMA_100M
from millrace.bench.common.options import command as made
from millrace.bench.common.options import option, read_dtype, read_names

KINDS = ("json_object", "json_schema", "json_names", "regex", "choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The measurements. `threads`: compute threads; 0: all cores."""

    batch: int = option(8, "--batch", min=1, help="Sequences at once.")
    context_tokens: int = option(512, "--context-tokens", min=1, help="Of every sequence.")
    steps: int = option(200, "--steps", min=1, help="Steps of both batches, each kind.")
    vocabulary: int = option(32_000, "--vocabulary", min=1024, help="Tokens that a mask has.")
    kinds: Sequence[str] = option(
        KINDS, "--kinds", read=read_names(*KINDS), help="Constraints that are measured."
    )
    threads: int = option(0, "--threads", min=0, help="Compute threads; 0: all cores.")
    dtype: str = option("bfloat16", "--dtype", read=read_dtype, help="float32 or bfloat16.")
    model: Mapping[str, Any] = field(default_factory=lambda: LLAMA_100M)


command = made(
    Settings,
    "Decode steps whose answers are constrained, beside steps of the same batch that are not.",
)
