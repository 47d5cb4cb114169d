"""The options of `millrace bench gateway`, which measures the cost of the proxy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millrace.bench.common.options import command as made
from millrace.bench.common.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of the options."""

    model: Path | None = option(  # noqa: RUF009 - it declares a field
        None,
        "--model",
        kind=Path | None,
        exists=True,
        file_okay=False,
        help="Model folder with the tokenizer. Default: a tiny model.",
    )
    requests: int = option(4000, "--requests", min=100, help="Unary requests.")
    streams: int = option(64, "--streams", min=1, help="Concurrent streams.")
    tokens: int = option(400, "--tokens", min=8, help="Tokens per stream.")
    prompt_characters: int = option(
        200, "--prompt-characters", min=1, help="Characters of each prompt."
    )
    long_tokens: int = option(
        1_000_000,
        "--long-tokens",
        min=0,
        help="Tokens of the long prompts that come beside paced streams; 0: none.",
    )
    tracing: bool = option(
        False,
        "--tracing",
        help="Measure the cost of traces instead: CPU per request with traces over without.",
    )


command = made(
    Settings,
    "Measure the proxy alone: CPU per request and per token, added latency, tokens/s.",
    json="Write the results as JSON.",
)
