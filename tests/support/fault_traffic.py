"""What is asked of a stack that is done harm to: answers of every kind, by name."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from support.deadlines import HANG_S
from support.fault_scene import LATE, Asked, Scene
from support.live_stack import live_stack
from support.served_model import served_folder
from support.tiny_models import prompt

MODEL = "llama"
SETTINGS = [
    *("engine.dtype=float32", "engine.max_chunk_tokens=16", "engine.prefix_cache=off"),
    *("scheduler.heartbeat_s=0.2", "scheduler.lease_s=5", "scheduler.slow_factor=0"),
    *("scheduler.tasks_ahead=1", "scheduler.batch_tokens=0", "scheduler.max_deaths=16"),
]

TEMPLATE = """{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages %}
{{ m.role }}: {{ m.content }}{% endfor %}{% if add_generation_prompt %}
assistant: {% endif %}"""
TURNS = {
    "type": "array",
    "items": {"enum": ["left", "right"]},
    "minItems": 24,
    "maxItems": 24,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "walk",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"turns": TURNS},
            "required": ["turns"],
            "additionalProperties": False,
        },
    },
}


def text(prompt_tokens: int, tokens: int, **sampling: Any) -> tuple[str, dict[str, Any]]:
    """Path and body of an answer without a tool."""
    body = {"prompt": prompt(prompt_tokens, prompt_tokens), "max_tokens": tokens}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return "/v1/completions", {**body, **sampling}


CALL = {
    "messages": [{"role": "user", "content": "Which way?"}],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "walk"}},
    "temperature": 1.0,
    "seed": 3,
    "max_tokens": 400,
    "return_token_ids": True,
}
BESIDE = ("greedy", "seeded", "short")
ASKED: dict[str, Asked] = {
    "greedy": text(20, 120),
    "seeded": text(300, 60, temperature=1.2, seed=1, presence_penalty=0.3),
    "short": text(40, 60, temperature=1.0, seed=4),
    "long prompt": text(900, 20),
    "long answer": text(60, 300),
    "tool call": ("/v1/chat/completions", CALL),
    LATE: text(50, 8),
}


@asynccontextmanager
async def scene_of(
    folder: Path, *, settings: Sequence[str] = (), store_pid: int | None = None, **layout: Any
) -> AsyncIterator[Scene]:
    """Runs a stack whose model is copied to `folder`, and has every answer once, undisturbed.

    `store_pid`: of a store that is not the stack's own.
    """
    shutil.copytree(served_folder(MODEL), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    layout = {"schedulers": 2, **layout, "settings": [*SETTINGS, *settings]}
    async with (
        live_stack(folder, **layout) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        scene = Scene(stack, client, ASKED, BESIDE, store_pid=store_pid)
        await scene.begin()
        yield scene
