"""A staged model within one process: later stages on threads, rows over bounded queues."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from millrace.engine.forward.passes import Passes
from millrace.engine.forward.stage_passes import StagePasses, stage_pool
from millrace.engine.kv.pool import KvPool
from millrace.engine.model.config import ModelConfig
from millrace.engine.model.loader import Model, load_model
from millrace.engine.model.stage import Stage
from millrace.engine.parallel.group_passes import GroupPasses, load_ranks
from millrace.engine.parallel.kv_memory import mapped, new_memory
from millrace.engine.parallel.rank_group import RankGroup
from millrace.engine.pipeline.in_flight import StageError
from millrace.engine.pipeline.messages import Command
from millrace.engine.pipeline.rows import Handed
from millrace.engine.pipeline.runner import PipelineRunner
from millrace.engine.pipeline.stage_loop import StageLoop
from support.deadlines import HANG_S
from support.tiny_engine import layout_of

FIVE_LAYERS = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
"""A Llama of five layers, as config.json has it."""


class Rows:
    """Both ends of the connection of two stages, with room for a few passes."""

    def __init__(self, slots: int = 3) -> None:
        self._room = threading.Semaphore(slots)
        self.free = slots
        self._lock = threading.Lock()
        self.on_rows: Callable[[Handed], None] = lambda handed: None

    def send(self, number: int, summands: tuple[Tensor, Tensor]) -> None:
        assert self._room.acquire(timeout=HANG_S)
        with self._lock:
            self.free -= 1
        with torch.inference_mode(False):
            x = torch.empty(summands[0].shape, dtype=summands[0].dtype)
        x.copy_(summands[0] + summands[1])
        self.on_rows(Handed(number, x, lambda: self._take(x)))

    def _take(self, x: Tensor) -> None:
        with torch.no_grad():
            x.fill_(float("nan"))  # the slot belongs to another pass now
        with self._lock:
            self.free += 1
        self._room.release()


class Staged:
    """A `runner` over a model in `count` stages; `loops` are those of the later stages. With
    `groups` each stage's layers are split over the ranks of a group. With `own_pools` every stage
    and rank has memory of its own for KV."""

    def __init__(
        self,
        folder: Path,
        count: int,
        *,
        dtype: str = "float32",
        page_tokens: int = 16,
        num_pages: int = 64,
        groups: Sequence[RankGroup] = (),
        own_pools: bool = False,
    ) -> None:
        stages = [Stage(i, count) for i in range(count)]
        of_stage = groups[:count] or [None] * count
        models = [
            _load(folder, dtype, stage, group)
            for stage, group in zip(stages, of_stage, strict=True)
        ]
        whole = ModelConfig.from_folder(folder)
        layout = replace(
            layout_of(models[0], num_pages, page_tokens),
            num_layers=whole.num_layers,
            model_layers=whole.num_layers,
        )
        handle = None if own_pools else new_memory(layout)
        memory = None if handle is None else mapped(layout, handle)
        mine = None if memory is None else memory[0]
        passes: list[Passes] = [
            StagePasses(model, stage_pool(model, layout, mine), stage=stage, memory=mine)
            if group is None
            else GroupPasses(group, model, layout, stage=stage, handle=handle)
            for model, stage, group in zip(models, stages, of_stage, strict=True)
        ]
        if handle is not None:
            os.close(handle)
        first = passes[0]
        self.pool = first.pool if mine is None else KvPool(layout, torch.device("cpu"), mine)
        storage = first.storage if memory is None else memory
        self.count = count - 1
        self.rows = [Rows() for _ in range(count)]
        self.runner = PipelineRunner(
            first, self.pool, storage, whole, self.rows[0], self, own_pools=own_pools
        )
        self.passes = passes  # of the stages, the first one included
        self.answer = self.runner.in_flight.receive
        self.loops = [
            StageLoop(
                passes[i + 1],
                self.rows[i + 1],
                lambda answer: self.answer(answer),
                own_pools=own_pools,
            )
            for i in range(self.count)
        ]
        for i, loop in enumerate(self.loops):
            self.rows[i].on_rows = loop.hand
        self.rows[-1].on_rows = self.runner.in_flight.hand
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), daemon=True) for loop in self.loops
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, loop: StageLoop) -> None:
        try:
            with torch.inference_mode():
                loop.run()
        except Exception as error:
            self.runner.in_flight.fail(StageError(f"{type(error).__name__}: {error}"))

    def send(self, command: Command, stage: int | None = None) -> None:
        for loop in self.loops if stage is None else [self.loops[stage]]:
            loop.send(command)

    def kv(self, pages: Sequence[int]) -> Tensor:
        """[layers, pages, 2, heads, page_tokens, head_dim] of what this process maps: all layers,
        and the heads of all ranks where they share memory."""
        layers = torch.cat([passes.storage[:, :, list(pages)] for passes in self.passes], dim=1)
        return torch.cat(list(layers), dim=3)

    def close(self) -> None:
        for loop in self.loops:
            loop.close()
        for thread in self._threads:
            thread.join(HANG_S)
            assert not thread.is_alive()

    def check_settled(self) -> None:
        """Checks that nothing is left, once passes in flight have ended."""
        deadline_s = time.monotonic() + HANG_S
        while not self._is_empty and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert self._is_empty

    @property
    def _is_empty(self) -> bool:
        """Returns whether the pipeline is empty."""
        return (
            len(self.runner.in_flight) == 0
            and all(rows.free == 3 for rows in self.rows)
            and not any(map(len, self.loops))
        )


def _load(folder: Path, dtype: str, stage: Stage, group: RankGroup | None) -> Model:
    if group is None:
        return load_model(folder, device="cpu", dtype=dtype, stage=stage)
    return load_ranks(group, folder, dtype=dtype, stage=stage)
