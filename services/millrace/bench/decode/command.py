"""The options of `millrace bench decode`: decode through a whole stack. `run.py` measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.bench.common.models import LLAMA_100M
from millrace.bench.common.options import command as made
from millrace.bench.common.options import option, read_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """threads: compute threads of the decode instance and of the bare engine; 0: half the cores."""

    batch: int = option(8, "--batch", min=1, help="Requests at once.")
    prompt_tokens: int = option(512, "--prompt-tokens", min=1)
    steps: int = option(256, "--steps", min=1, help="Steps that all requests take together.")
    rounds: int = option(3, "--rounds", min=1, help="Medians are reported.")
    threads: int = option(
        0, "--threads", min=0, help="Of decode and of the bare engine; 0: half the cores."
    )
    prefill_threads: int = option(0, "--prefill-threads", min=0, help="0: as --threads.")
    telemetry: bool = option(
        False,
        "--telemetry",
        help="Compare stacks with all telemetry on and off instead.",
    )
    dtype: str = option("bfloat16", "--dtype", read=read_dtype, help="float32 or bfloat16.")
    model: Mapping[str, Any] = field(default_factory=lambda: LLAMA_100M)


command = made(
    Settings,
    "Decode throughput through a whole local stack, beside the bare engine's in the same run.",
)
