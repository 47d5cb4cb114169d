"""The names for options of benchmarks. They stand here so that `--help` loads no engine."""

from __future__ import annotations

from typing import Final

#: Parts of `bench cdsp`.
CDSP_PARTS: Final = ("sp", "balancing", "ring", "load")

#: Parts of `bench long` on one engine, and all of its parts.
LONG_MIXED_PARTS: Final = ("predictor", "chunking", "batching")
LONG_PARTS: Final = (*LONG_MIXED_PARTS, "spp", "kvp")

#: Kernels of `bench kernels`.
KERNELS: Final = (
    "prefill",
    "decode",
    "ring",
    "merge",
    "rope_write_kv",
    "add_rms_norm",
    "silu_mul",
    "linear",
    "after_norm",
    "after_silu",
    "experts",
    "sample",
)
CHUNKS = "chunks"
KERNEL_NAMES: Final = (*KERNELS, CHUNKS)

DTYPES: Final = ("float32", "bfloat16")
