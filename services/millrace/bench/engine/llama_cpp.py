"""llama.cpp in `millrace bench engine`: its C API through llama-cpp-python.

The weights are written to a GGUF file in the compared dtype. All else has llama.cpp's defaults: K/V
in F16, flash attention, prompts in batches of 2048 tokens and micro-batches of 512.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor

from millrace.core.arithmetic import ceil_div
from millrace.core.errors import MillraceError
from millrace.engine.model.config import ModelConfig

BATCH_TOKENS = 2048
MICRO_BATCH_TOKENS = 512
_DECODE_ROOM_TOKENS = 1024
_CONTEXT_STEP = 256  # llama.cpp's contexts are multiples of it

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def check_packages() -> None:
    """Raises MillraceError when a package of the comparison is missing."""
    for name in ("gguf", "llama_cpp"):
        _package(name)


def _package(name: str) -> ModuleType:
    """Imports an optional package, only when the engine is compared with it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MillraceError(
            f"llama.cpp is missing: {error}; "
            "install it with `pip install llama-cpp-python==0.3.36 gguf==0.19.0`, or leave it out "
            "with --against transformers"
        ) from error


def write_gguf(folder: Path, path: Path, dtype: str) -> None:
    """Writes the Llama in `folder` (config.json, model.safetensors) as GGUF.

    dtype: float32 or bfloat16, of the matrices; norms are float32 always. Raises MillraceError when
    the gguf package is missing.
    """
    gguf = _package("gguf")
    config = ModelConfig.from_folder(folder)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_context_tokens)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_tokenizer_model("no_vocab")
    for name, weight in _gguf_weights(folder, config):
        if weight.ndim == 1 or dtype == "float32":
            writer.add_tensor(name, weight.float().numpy())
        else:
            raw = weight.to(torch.bfloat16).view(torch.uint8).numpy()
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_weights(folder: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    with safe_open(folder / "model.safetensors", "pt") as weights:
        for full_name in weights.keys():  # noqa: SIM118 - it is no mapping
            name, weight = full_name.removesuffix(".weight"), weights.get_tensor(full_name)
            if name in _OUTER_NAMES:
                yield f"{_OUTER_NAMES[name]}.weight", weight
                continue
            _, _, layer, inner_name = name.split(".", 3)
            kind = _LAYER_NAMES[inner_name]
            if kind in heads:
                weight = _interleaved(weight, heads[kind])
            yield f"blk.{layer}.{kind}.weight", weight


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Orders rows of a q or k projection for the rotation of neighbours in GGUF's Llama.

    Hugging Face rotates rows i and i + d/2 of a head together; here they become 2i and 2i + 1.
    """
    rows = weight.shape[0]
    return weight.view(heads, 2, rows // heads // 2, -1).transpose(1, 2).reshape(rows, -1)


class LlamaCppEngine:
    """One model, with a context for the latest case."""

    def __init__(self, gguf_path: Path, threads: int) -> None:
        """Raises MillraceError when llama.cpp is not installed or can't read the file."""
        self._api = api = _package("llama_cpp")
        self._threads = threads
        # Kept alive, since the library uses it. Without it llama.cpp prints a hundred lines per
        # model.
        self._quiet = api.llama_log_callback(lambda *_: None)
        api.llama_log_set(self._quiet, None)
        api.llama_backend_init()
        parameters = api.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = api.llama_model_load_from_file(str(gguf_path).encode(), parameters)
        if not self._model:
            raise MillraceError(f"llama.cpp can't load {gguf_path}")
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._context: _Context | None = None

    def prefill(self, prompt: Tensor) -> Tensor:
        """Takes int64 [n]; returns float32 logits [vocab] of the last position."""
        context = self._context_for(1, len(prompt))
        context.prefill(prompt)
        return context.logits(1)[0]

    def start_decode(self, batch: int, context_tokens: int) -> Callable[[Tensor], Tensor]:
        """Works as `Engine.start_decode`. The random context is computed once and copied to every
        sequence; the next start at the same size only drops the decoded tokens.
        """
        context = self._context_for(batch, context_tokens + _DECODE_ROOM_TOKENS)
        if context.kept_tokens != context_tokens:
            context.prefill(torch.randint(self._vocab_size, (context_tokens,)))
            context.share()
        context.rewind()
        return lambda token_ids: context.decode(token_ids).argmax(-1)

    def close(self) -> None:
        """Frees context and model."""
        if self._context is not None:
            self._context.close()
            self._context = None
        self._api.llama_model_free(self._model)

    def _context_for(self, batch: int, tokens: int) -> _Context:
        """Returns a context for `batch` sequences of up to `tokens` each; the last one if it
        fits.
        """
        shape = (batch, tokens)
        if self._context is None or self._context.shape != shape:
            if self._context is not None:
                self._context.close()
            self._context = _Context(self._api, self._model, shape, self._threads, self._vocab_size)
        return self._context


class _Context:
    """K/V of `shape[0]` sequences of up to `shape[1]` tokens, each in memory of its own."""

    def __init__(
        self,
        api: ModuleType,
        model: Any,  # noqa: ANN401 - ctypes
        shape: tuple[int, int],
        threads: int,
        vocab_size: int,
    ) -> None:
        self.shape = shape
        self.kept_tokens = 0  # of every sequence, before the decoded tokens
        self._api = api
        self._vocab_size = vocab_size
        sequences, tokens = shape
        parameters = api.llama_context_default_params()
        parameters.n_ctx = sequences * ceil_div(tokens, _CONTEXT_STEP) * _CONTEXT_STEP
        parameters.n_batch = BATCH_TOKENS
        parameters.n_ubatch = MICRO_BATCH_TOKENS
        parameters.n_seq_max = sequences
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        parameters.kv_unified = False
        self._context = api.llama_init_from_model(model, parameters)
        if not self._context:
            raise MillraceError(f"llama.cpp can't make a context of {sequences} x {tokens} tokens")
        self._memory = api.llama_get_memory(self._context)
        self._prompt = _Batch(api, np.zeros(BATCH_TOKENS, dtype=np.int32))
        self._rows = _Batch(api, np.arange(sequences, dtype=np.int32))
        self._rows.wanted[:] = 1

    def prefill(self, prompt: Tensor) -> None:
        """Drops everything and computes a prompt in sequence 0, for its last logits."""
        self._api.llama_memory_clear(self._memory, False)
        batch, end = self._prompt, len(prompt)
        for start in range(0, end, BATCH_TOKENS):
            count = min(BATCH_TOKENS, end - start)
            batch.tokens[:count] = prompt[start : start + count]
            batch.positions[:count] = np.arange(start, start + count)
            batch.wanted[:] = 0
            batch.wanted[count - 1] = start + count == end
            self._run(batch, count)
        self.kept_tokens = end

    def share(self) -> None:
        """Copies sequence 0 to all others."""
        for sequence in range(1, self.shape[0]):
            self._api.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def rewind(self) -> None:
        """Drops the tokens decoded after the prompt."""
        for sequence in range(self.shape[0]):
            self._api.llama_memory_seq_rm(self._memory, sequence, self.kept_tokens, -1)
        self._rows.positions[:] = self.kept_tokens

    def decode(self, token_ids: Tensor) -> Tensor:
        """Decodes one token of every sequence, int64 [sequences]; returns logits [sequences,
        vocab].
        """
        self._rows.tokens[:] = token_ids
        self._run(self._rows, len(token_ids))
        self._rows.positions += 1
        return self.logits(len(token_ids))

    def logits(self, rows: int) -> Tensor:
        """Returns float32 [rows, vocab] of the last call, in memory that the next call
        overwrites.
        """
        found = self._api.llama_get_logits(self._context)
        return torch.from_numpy(np.ctypeslib.as_array(found, (rows, self._vocab_size)))

    def close(self) -> None:
        self._api.llama_free(self._context)

    def _run(self, batch: _Batch, rows: int) -> None:
        batch.struct.n_tokens = rows
        status = self._api.llama_decode(self._context, batch.struct)
        if status:
            raise MillraceError(f"llama_decode of {rows} tokens ended with status {status}")


class _Batch:
    """The rows of a `llama_decode` call over arrays of ours; `sequences`: int32 [rows]."""

    def __init__(self, api: ModuleType, sequences: npt.NDArray[np.int32]) -> None:
        rows, number = len(sequences), ctypes.POINTER(ctypes.c_int32)
        self.tokens = np.zeros(rows, dtype=np.int32)
        self.positions = np.zeros(rows, dtype=np.int32)
        self.wanted = np.zeros(rows, dtype=np.int8)  # whether a row's logits are wanted
        ones = np.ones(rows, dtype=np.int32)
        first = sequences.ctypes.data
        pointers = (number * rows)(*(ctypes.cast(first + 4 * row, number) for row in range(rows)))
        self._kept = (sequences, ones, pointers)  # the struct only points at them
        self.struct = api.llama_batch(
            token=self.tokens.ctypes.data_as(number),
            pos=self.positions.ctypes.data_as(number),
            n_seq_id=ones.ctypes.data_as(number),
            seq_id=pointers,
            logits=self.wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
