"""Part *stack*: one prefill and one decode instance that share the device answer as one engine.

The model is the toy model of the source tree; answers are greedy.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import httpx
import torch
from tokenizers import Tokenizer

from millrace.bench.gpu.part import Context
from millrace.core.config import EngineConfig
from millrace.engine.assembly import Engine, open_engine
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.kv.step_tables import page_table_of
from millrace.local.options import StackOptions
from millrace.local.stack import Stack

_PROMPTS: Final = (
    "Tell me a story about a heron.",
    "The key for the north gate is amber. " * 12 + "What is the key for the north gate?",
    "Who are you?",
)
_TOKENS: Final = 24
_START_S: Final = 60.0


def check(context: Context) -> None:
    """Compares the answers of the stack with those of an engine in this process."""
    model = context.source / "models" / "millrace-tiny"
    answered = asyncio.run(answers(context, model))
    # The stack has ended: the engine has the device to itself.
    settings = EngineConfig(device=str(context.device), kv_bytes=32 << 20)
    engine = open_engine(model, settings)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for prompt, found in zip(_PROMPTS, answered, strict=True):
        ids = tokenizer.encode(prompt).ids
        wanted = tokenizer.decode(greedy(engine, ids))
        detail = "" if found == wanted else f"{found!r}, an engine alone: {wanted!r}"
        context.claim(f"answer to {prompt[:30]!r}", found == wanted, detail)
    context.claim("an answer has text", any(answered))
    engine.close()


async def answers(context: Context, model: Path) -> list[str]:
    """Returns the stack's answers to the prompts, which it serves together."""
    options = StackOptions(
        model=str(model),
        port=0,
        prefill=1,
        decode=1,
        settings=[f"engine.device={context.device}", "engine.profile=none"],
        start_timeout_s=_START_S,
        devices=["0"] if context.is_cuda else [],
        share_devices=True,
    )
    async with Stack(options) as stack, httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
        asked = (_ask(client, prompt) for prompt in _PROMPTS)
        return list(await asyncio.gather(*asked))


async def _ask(client: httpx.AsyncClient, prompt: str) -> str:
    body = {
        "model": "millrace-tiny",
        "prompt": prompt,
        "max_tokens": _TOKENS,
        "temperature": 0,
    }
    answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["text"]
    return text


@torch.inference_mode()
def greedy(engine: Engine, prompt: list[int]) -> list[int]:
    """Returns the greedy tokens after a prompt, without the token that ends the answer."""
    ends = engine.shape.eos_token_ids
    pages = engine.pool.allocate(engine.layout.pages_for(len(prompt) + _TOKENS))
    task = PrefillTask(token_ids=torch.tensor(prompt), history_tokens=0, pages=pages)
    for _ in engine.runner.prefill_batch([task]):
        pass
    assert task.logits is not None  # the task asked for logits
    tokens = [int(task.logits.argmax())]
    table = page_table_of([pages])
    while tokens[-1] not in ends and len(tokens) < _TOKENS:
        at = torch.tensor([len(prompt) + len(tokens) - 1])
        fed = torch.tensor(tokens[-1:])
        tokens.append(int(engine.runner.decode(fed, at, table, (at + 1).int())[0].argmax()))
    engine.pool.free(pages)
    return tokens[:-1] if tokens[-1] in ends else tokens
