"""`millrace bench long`: measures long contexts, for Mnemosyne's and Medha's figures.

All parts run on this machine, with a random Llama of 27 million parameters. On one engine: the
error of predictions of mixed batches (Medha section 4.3); a long prompt beside decodes in adaptive
and in static chunks (Mnemosyne Figure 8, Medha Figure 4); the cost of short decodes for an
iteration of a long prefill (Mnemosyne Figure 22). On several engines: the time between tokens and
of an iteration when a context lies at up to four workers (KVP, Mnemosyne section 4.4 and Figure
19), which are processes that exchange queries and partial results over NIXL.

Also the speedup of a long prompt whose chunks follow each other through stages (SPP, Mnemosyne
section 4.3).

KVP workers share this machine's cores; a pass's time with cores of their own is computed from CPU
times and communication, and shown beside the measured time (`kvp.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from millrace.bench.common.options import LESS, option, read_dtype, read_names, read_numbers
from millrace.bench.common.options import command as made

#: Parts on one engine, and all parts.
MIXED_PARTS = ("predictor", "chunking", "batching")
PARTS = (*MIXED_PARTS, "spp", "kvp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """parts: of `PARTS`. threads: per engine, 0: all cores. prompt_tokens: of the long prompt.

    Predictor: profile_s seconds of measuring, `batches` random batches, `rounds` times each.
    Chunking: the static chunks' tokens, with `decodes` on `context_tokens` each beside them.
    Batching: `short_decodes` on `short_context_tokens` each beside chunks of `chunk_tokens`, at
    `histories` histories, `batching_rounds` times. Spp: a prompt in chunks through each number of
    stages.
    """

    parts: tuple[str, ...] = option(
        PARTS,
        "--parts",
        read=read_names(*PARTS),
        metavar="NAME,...",
        help="Of " + ", ".join(PARTS) + ".",
    )
    dtype: str = option("bfloat16", "--dtype", read=read_dtype, help="float32 or bfloat16.")
    threads: int = option(
        0, "--threads", min=0, help="Of the engine; 0: all cores. Of kvp: 1 each."
    )
    prompt_tokens: int = option(
        24_576, "--prompt-tokens", min=1024, max=65_536, help="Of the long prompt."
    )
    profile_s: float = 20.0
    batches: int = 60
    rounds: int = 3
    most_decodes: int = 32
    static: tuple[int, ...] = option(
        (128, 512, 2048),
        "--static",
        read=read_numbers(),
        metavar="TOKENS,...",
        help="Static chunks.",
    )
    decodes: int = 8
    context_tokens: int = 512
    short_decodes: int = 32
    short_context_tokens: int = 256
    chunk_tokens: int = option(
        512, "--chunk-tokens", min=64, max=2048, help="Of the part batching."
    )
    histories: int = 5
    batching_rounds: int = 9
    degrees: tuple[int, ...] = option(
        (1, 2, 4), "--kvp", read=read_numbers(1), metavar="N,...", help="Workers of a context."
    )
    contexts: tuple[int, ...] = option(
        (4096, 8192, 16_384, 32_768, 65_536),
        "--contexts",
        read=read_numbers(),
        metavar="TOKENS,...",
        help="Of the part kvp.",
    )
    token_repeats: int = 15
    most_tokens: int = 12_288
    growth_steps: int = 8
    growth_chunk_tokens: int = 32
    growth_repeats: int = 3
    stages: tuple[int, ...] = (1, 2, 4)
    stage_prompt_tokens: int = 8192
    stage_chunk_tokens: int = 256
    stage_repeats: int = 3

    def quick(self) -> Settings:
        """Returns settings for a short run: its figures are not to be quoted."""
        return replace(
            self,
            prompt_tokens=min(self.prompt_tokens, 8192),
            profile_s=min(self.profile_s, 5.0),
            batches=min(self.batches, 20),
            rounds=1,
            static=self.static[::2],
            histories=3,
            batching_rounds=3,
            contexts=self.contexts[1:4:2],
            token_repeats=5,
            most_tokens=min(self.most_tokens, 4096),
            growth_steps=4,
            growth_repeats=1,
            stages=self.stages[:2],
            stage_prompt_tokens=4096,
            stage_repeats=1,
        )


command = made(
    Settings,
    "Long contexts: predictions, adaptive chunks, decodes beside a prefill, stages, KVP.",
    plot="PNG: errors, iterations, decodes, shards.",
    quick=LESS,
)
