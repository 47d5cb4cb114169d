"""Part *decode*: steps by CUDA graphs and ahead of their tokens, against steps without both; steps
and prefills against transformers on the same device."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from millrace.bench.gpu.part import Context
from millrace.bench.gpu.shapes import FAMILIES, LLAMA_3_8B, write_config
from millrace.bench.gpu.small_engine import small_engine
from millrace.bench.gpu.steps import (
    decoding,
    followed,
    prefill_s,
    profiled,
    seconds_per_step,
    times_s,
    tokens_of,
)
from millrace.core.config import EngineConfig
from millrace.engine.assembly import Engine, open_engine
from millrace.engine.attention_cost import settled_s

_CONTEXTS: Final = (150, 1, 40)
_PROMPT: Final = 50
_TOKENS: Final = 12


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: a model, batches of sequences of one context, steps of each, and prompts
    in passes of at most `chunk_tokens`."""

    shape: Mapping[str, Any]
    batches: tuple[int, ...]
    context: int
    steps: int
    prompts: tuple[int, ...]
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class Others:
    """Seconds of transformers: of a decode step by batch, of a whole prompt by its tokens."""

    steps_s: Mapping[int, float] = field(default_factory=dict)
    prompts_s: Mapping[int, float] = field(default_factory=dict)


ON_CUDA: Final = Sizes(LLAMA_3_8B, (1, 32), 2048, 24, (8192, 32_768), 8192)
ON_CPU: Final = Sizes(FAMILIES["llama"], (1, 3), 32, 4, (64,), 64)
_REPEATS: Final = 2  # of a prompt


@torch.inference_mode()
def check(context: Context) -> None:
    """Compares tokens in small models, then measures."""
    for family in ("llama", "mistral", "qwen3_moe"):
        compare(context, family)
    sizes = ON_CUDA if context.is_cuda else ON_CPU
    others = Others()
    try:
        importlib.import_module("transformers")
    except ImportError as error:  # not installed, or not with the packages beside it
        context.claim("transformers", True, f"not compared: {error}")
    else:
        compare_with_transformers(context)
        others = transformers_s(context, sizes)
    measure(context, sizes, others)


def compare(context: Context, family: str) -> None:
    """Compares tokens of the two kinds of steps. A batch of at most 8 has the same bits in each, if
    one backend computes attention: graphs have Triton's.
    """
    dtype, backend = ("bfloat16", "triton") if context.is_cuda else ("float32", "auto")
    found, steps = [], []
    for fast in (False, True):
        with small_engine(FAMILIES[family], str(context.device), dtype, backend) as engine:
            engine.pool.storage.copy_(
                torch.linspace(-1, 1, engine.pool.storage.numel()).view_as(engine.pool.storage)
            )
            with decoding(engine, _CONTEXTS, _TOKENS, fast=fast) as batch:
                found.append(tokens_of(batch))
            steps.append(engine.runner.states.steps)
    by = f"{steps[1].graph} steps by graphs, others {dict(steps[1].eager)}"
    same = found[0] == found[1] and len(found[0]) == len(_CONTEXTS)
    has_graphs = not context.is_cuda or (steps[1].graph > 0 and not steps[1].eager)
    context.claim(f"{family}: the same tokens", same and has_graphs, by)


def compare_with_transformers(context: Context) -> None:
    """Compares greedy tokens of a small float32 model, whose weights transformers has drawn."""
    import transformers

    torch.manual_seed(0)
    prompt = [(7 * i) % 500 for i in range(_PROMPT)]
    with TemporaryDirectory() as folder, torch.inference_mode(False), torch.no_grad():
        config = transformers.AutoConfig.from_pretrained(
            write_config(Path(folder) / "config", FAMILIES["llama"])
        )
        model = _drawn(config, dtype=torch.float32)
        model.save_pretrained(Path(folder) / "model")
        ids = torch.tensor([prompt], device=context.device)
        model.to(context.device)
        for _ in range(_TOKENS):
            chosen = model(ids).logits[:, -1:].argmax(-1)
            ids = torch.cat((ids, chosen), 1)
        wanted = ids[0, _PROMPT:].tolist()
        engine = open_engine(
            Path(folder) / "model",
            EngineConfig(device=str(context.device), dtype="float32", kv_bytes=16 << 20),
        )
    pages = engine.pool.allocate(engine.layout.pages_for(_PROMPT + _TOKENS))
    found = followed(engine, prompt, pages, _TOKENS)
    engine.close()
    context.claim("the tokens of transformers", found == wanted, f"{_TOKENS} tokens, float32")


def transformers_s(context: Context, sizes: Sizes) -> Others:
    """Returns seconds of transformers (SDPA): of greedy decode steps, and of prompts."""
    import transformers

    with TemporaryDirectory() as folder:
        config = transformers.AutoConfig.from_pretrained(
            write_config(Path(folder) / "model", sizes.shape)
        )
    with torch.device(context.device):
        model = _drawn(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    steps_s, prompts_s = {}, {}
    for tokens in sizes.prompts:
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=context.device)
        prompt = partial(model, ids, use_cache=True, logits_to_keep=1)
        prompts_s[tokens] = statistics.median(times_s(context.device, _REPEATS, prompt))
    for batch in sizes.batches:
        ids = torch.zeros(batch, sizes.context, dtype=torch.int64, device=context.device)
        kept = model(ids[:1], use_cache=True, logits_to_keep=1)
        cache = kept.past_key_values
        cache.batch_repeat_interleave(batch)
        chosen = ids[:, :1]
        begun_s = 0.0
        for step in range(sizes.steps + 2):
            if step == 2:
                begun_s = settled_s(context.device)
            logits = model(chosen, past_key_values=cache, use_cache=True).logits
            chosen = logits[:, -1:].argmax(-1)
        steps_s[batch] = (settled_s(context.device) - begun_s) / sizes.steps
        del cache, kept
    del model, prompt
    if context.is_cuda:
        torch.cuda.empty_cache()
    return Others(steps_s, prompts_s)


def _drawn(config: Any, **options: Any) -> Any:  # noqa: ANN401 - transformers: untyped
    import transformers

    make: Any = transformers.AutoModelForCausalLM.from_config
    return make(config, **options)


def measure(context: Context, sizes: Sizes, others: Others) -> None:
    """Measures steps and prompts of one model in one run, as ratios."""
    with TemporaryDirectory() as folder:
        engine = open_engine(
            write_config(Path(folder) / "model", sizes.shape),
            EngineConfig(
                device=str(context.device),
                dtype="bfloat16",
                load_format="dummy",
                kv_bytes=0 if context.is_cuda else 64 << 20,
                max_batch=max(sizes.batches),
                cuda_graph_batches=",".join(map(str, sizes.batches)),
                max_context_tokens=max(sizes.context + 4 * sizes.steps, *sizes.prompts),
            ),
        )
    for batch in sizes.batches:
        fast_s = _measured(context, engine, sizes, batch, fast=True)
        slow_s = _measured(context, engine, sizes, batch, fast=False)
        context.figure(f"decode of {batch}, than one by one: faster by", slow_s / fast_s, "times")
        if batch in others.steps_s:
            faster = others.steps_s[batch] / fast_s
            context.figure(f"decode of {batch}, faster than transformers by", faster, "times")
    for tokens, other_s in others.prompts_s.items():
        faster = other_s / prefill_s(engine, tokens, sizes.chunk_tokens, _REPEATS)
        context.figure(f"prefill of {tokens}, faster than transformers by", faster, "times")
    engine.close()


def _measured(context: Context, engine: Engine, sizes: Sizes, batch: int, *, fast: bool) -> float:
    way = "graphs and ahead" if context.is_cuda else "ahead"
    name = f"decode of {batch}, {way if fast else 'one by one'}"
    with decoding(engine, (sizes.context,) * batch, 3 * sizes.steps, fast=fast) as running:
        seconds = seconds_per_step(engine, running, sizes.steps)
        calls, host_us = profiled(engine, running, min(8, sizes.steps))
    context.figure(f"{name}: step", 1e3 * seconds, "ms")
    context.figure(f"{name}: launches of a step", calls, "launches" if context.is_cuda else "calls")
    context.figure(f"{name}: host's part of a step", host_us, "us")
    return seconds
