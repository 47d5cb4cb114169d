"""The settings of an instance: its engine, its mixed batches, its transfers of KV."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Final

from millrace.core.arithmetic import ceil_div
from millrace.core.config.fields import Section, one_of, setting, within

_PAGE_ON_CPU: Final = 16
_PAGE_ON_GPU: Final = 64


def _batches(value: Any) -> str | None:  # noqa: ANN401 - a check sees any field's value
    sizes = str(value).split(",") if value else []
    if all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        return None
    return "numbers of sequences of at least 1, separated by commas"


def _addresses(value: Any) -> str | None:  # noqa: ANN401 - a check sees any field's value
    addresses = str(value).split(",") if value else []
    if all(re.fullmatch(r"\s*[^\s:,]+:[1-9][0-9]{0,4}\s*", one) for one in addresses):
        return None
    return "addresses HOST:PORT, separated by commas"


def _rows(value: Any) -> str | None:  # noqa: ANN401 - a check sees any field's value
    fits = value == "none" or _batches(value) is None
    return None if fits else "none, or numbers of rows of at least 1, separated by commas"


def _profile(value: Any) -> str | None:  # noqa: ANN401 - a check sees any field's value
    known = isinstance(value, str) and (value in ("auto", "none") or value.endswith(".json"))
    return None if known else "auto, none or the path of a .json file"


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Section):
    device: str = setting("auto", None, "auto, cpu, cuda or cuda:N")
    dtype: str = setting("auto", one_of("auto", "float32", "bfloat16"), "auto: the model's own")
    threads: int = setting(
        0, within(0, 4096), "compute threads; 0: OMP_NUM_THREADS, else the cores that it may use"
    )
    deterministic: str = setting(
        "auto",
        one_of("auto", "on", "off"),
        "a token gets the same logits, bit by bit, in any company and in any chunks. on: of an SP "
        "group too, and not on a GPU; auto: in bfloat16 on x86 CPUs with AVX2, except of SP "
        "groups, whose transfers overlap more then",
    )
    tensor_parallel: int = setting(
        1, within(1, 64), "ranks of an instance, which share each layer's heads and widths"
    )
    kv_pools: str = setting(
        "auto",
        one_of("auto", "shared", "own"),
        "KV pools of an instance's ranks and stages. shared: in one memory on the host; own: each "
        "has memory of its own; auto: shared on the host, own on GPUs",
    )
    stages: int = setting(
        1, within(1, 64), "pipeline stages of an instance, each with consecutive layers"
    )
    stage_hosts: str = setting(
        "",
        _addresses,
        "HOST:PORT,... of `millrace stage`, which run the stages after the first, in this order; "
        "empty: all stages are processes of one machine",
    )
    load_format: str = setting(
        "auto", one_of("auto", "dummy"), "dummy: random weights from config.json"
    )
    attention_backend: str = setting(
        "auto",
        one_of("auto", "cpu", "torch", "triton", "flashinfer", "reference"),
        "auto: the fastest that can run",
    )
    cuda_graphs: str = setting(
        "auto",
        one_of("auto", "on", "off"),
        "decode steps and short prefills by CUDA graphs. auto: where possible; on: without graphs "
        "of decode steps the instance does not start",
    )
    cuda_graph_batches: str = setting(
        "",
        _batches,
        "sizes of batches to capture, SEQUENCES,...; empty: powers of two and max_batch",
    )
    cuda_graph_rows: str = setting(
        "",
        _rows,
        "rows of prefills to capture, ROWS,...; empty: 16, 32, 64, 128, 256 and 512, up to "
        "max_chunk_tokens; none: prefills without graphs",
    )
    decode_ahead: str = setting(
        "auto",
        one_of("auto", "on", "off"),
        "a decode step begins before the host has the last step's tokens. auto: on GPUs",
    )
    page_tokens: int = setting(
        0,
        within(0, 1024),
        "tokens of a KV page. 0: 16 on CPUs; on GPUs at most 64, so that a cached block is whole "
        "pages",
    )
    kv_bytes: int = setting(0, within(0), "memory of the KV pool; 0: a share of the free memory")
    device_share: float = setting(
        1.0,
        within(0.01, 1.0),
        "share of a GPU's memory, weights included, if instances share a GPU",
    )
    max_context_tokens: int = setting(0, within(0), "longest context; 0: the model's own")
    max_chunk_tokens: int = setting(2048, within(1), "most tokens of a forward pass")
    max_suspended: int = setting(
        8,
        within(1, 1024),
        "most prefills suspended in the middle of a pass: each keeps its activations",
    )
    max_batch: int = setting(64, within(1, 4096), "sequences of a decode batch")
    prefix_cache: str = setting(
        "on",
        one_of("on", "off"),
        "keep KV of prompts and answers for prompts with the same prefix",
    )
    prefix_block_tokens: int = setting(
        64,
        within(1, 65536),
        "tokens of a cached block, rounded up to whole pages; equal in the whole fleet",
    )
    swap_bytes: int = setting(
        0,
        within(0),
        "host memory for the KV of preempted answers; if it is full, they are computed again",
    )
    profile: str = setting(
        "auto",
        _profile,
        "source of prefill times. auto: the profile that `millrace profile` wrote to the cache, or "
        "else a brief fit at start; none: the brief fit",
    )
    profile_cache: str = setting(
        "", None, "folder of measured profiles; empty: millrace/profiles in the user's cache folder"
    )

    @property
    def block_tokens(self) -> int:
        """The tokens of a block of the prefix cache: whole pages, on every kind of device."""
        page = self.page_tokens or _PAGE_ON_CPU
        return ceil_div(self.prefix_block_tokens, page) * page

    def page_tokens_on(self, device: str) -> int:
        """Returns the tokens of a page on a type of device. Larger pages are fewer runs of bytes
        in a transfer, of which each costs a GPU's sender microseconds."""
        if self.page_tokens:
            return self.page_tokens
        return math.gcd(self.block_tokens, _PAGE_ON_GPU) if device == "cuda" else _PAGE_ON_CPU


@dataclass(frozen=True, kw_only=True)
class MixedConfig(Section):
    """Batches of `millrace colocated --role mixed` (Medha section 4.3)."""

    t_target_ms: float = setting(
        50.0,
        within(0.1, 1e6),
        "longest predicted time of an iteration if no running answer has a TBT objective",
    )
    idle_target_ms: float = setting(
        100.0,
        within(0.1, 1e6),
        "longest predicted time of an iteration while no answer runs",
    )
    chunking: str = setting(
        "adaptive",
        one_of("adaptive", "static"),
        "adaptive: chunks shrink as their history grows; static: static_chunk_tokens per iteration",
    )
    static_chunk_tokens: int = setting(512, within(1), "tokens of a static iteration")
    min_chunk_tokens: int = setting(32, within(1), "smallest chunk, except a prompt's last")
    chunk_step_tokens: int = setting(32, within(1), "chunks are multiples of this")
    long_kv_tokens: int = setting(
        262_144,
        within(1),
        "history from which a prefill is long: a batch has at most one long prefill",
    )
    max_yield: float = setting(
        0.4,
        within(0.0, 0.99),
        "share of t_target that a long prefill yields to short ones",
    )
    multi_prefill: str = setting(
        "on", one_of("on", "off"), "chunks of several prompts share an iteration"
    )


@dataclass(frozen=True, kw_only=True)
class TransferConfig(Section):
    backends: int = setting(
        4, within(1, 1024), "requests that may transfer to one decode instance at the same time"
    )
    buffer_bytes: int = setting(
        0, within(0), "staging buffer per backend; 0: no buffer, writes go to the pages directly"
    )
    handshake_timeout_s: float = setting(30.0, within(0.01), "longest wait for a handshake")
    transfer_timeout_s: float = setting(60.0, within(0.01), "longest time without progress")
    lease_s: float = setting(
        30.0, within(0.05), "lifetime of a reservation without a message from its sender"
    )
    kv_checksum: str = setting(
        "off",
        one_of("on", "off"),
        "on: KV must arrive with a crc32c; rings, stages, KVP exchanges, notifications send theirs",
    )
