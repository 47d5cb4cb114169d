"""A prefill instance beside a decode instance, and a store that a test can hold up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from millrace.state.memory_store import MemoryStore
from support.tiny_models import prompt
from support.worker_roles import LiveRole, admit_decode, config, remember, run_prefill, spec

SETTINGS = config(max_chunk_tokens=64)


class GatedStore(MemoryStore):
    """Hands prompts out when `gate` is open; raises `error` if there is one."""

    def __init__(self) -> None:
        super().__init__(SETTINGS.store)
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.read: list[str] = []
        self.slices: list[tuple[str, int, int]] = []  # what was read of a prompt

    async def prompt_ids(self, request_id: str, start: int = 0, stop: int | None = None) -> Any:
        await self.gate.wait()
        self.read.append(request_id)
        if self.error is not None:
            raise self.error
        ids = await super().prompt_ids(request_id, start, stop)
        self.slices.append((request_id, start, start + len(ids)))
        return ids


@dataclass
class Pair:
    store: GatedStore
    prefill: LiveRole
    decode: LiveRole

    async def ask(
        self, request_id: str, tokens: int, *, admit: bool = True, **sampling: Any
    ) -> None:
        request = spec(request_id, tokens, **sampling)
        await remember(self.store, request, prompt(tokens))
        if admit:
            self.decode.role.on_command(admit_decode(request))
        self.prefill.role.on_command(run_prefill(request, self.decode.member))

    def started(self) -> list[str]:
        """The requests whose computation began, in order."""
        return [m.request_id for kind, m in self.prefill.messages if kind == "chunk_started"]

    @property
    def used_pages(self) -> int:
        return self.prefill.engine.pool.used_pages
