"""A staged model within one process: later stages on threads, rows over bounded queues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from millrace.engine.kv_pool import KvPool
from millrace.engine.loader import Model, load_model
from millrace.engine.parallel.stage import Stage
from millrace.engine.pipeline.behind import StageError
from millrace.engine.pipeline.messages import Command
from millrace.engine.pipeline.passes import StagePasses
from millrace.engine.pipeline.rows import Handed
from millrace.engine.pipeline.runner import PipelineRunner
from millrace.engine.pipeline.stage_loop import StageLoop
from support.tiny_engine import make_pool

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
    """Both ends of the way between two stages, with room for a few passes."""

    def __init__(self, slots: int = 3) -> None:
        self._room = threading.Semaphore(slots)
        self.free = slots
        self._lock = threading.Lock()
        self.on_rows: Callable[[Handed], None] = lambda handed: None

    def send(self, number: int, summands: tuple[Tensor, Tensor]) -> None:
        assert self._room.acquire(timeout=30)
        with self._lock:
            self.free -= 1
        with torch.inference_mode(False):
            x = torch.empty(summands[0].shape, dtype=summands[0].dtype)
        x.copy_(summands[0] + summands[1])
        self.on_rows(Handed(number, x, lambda: self._take(x)))

    def _take(self, x: Tensor) -> None:
        with torch.no_grad():
            x.fill_(float("nan"))  # the slot is somebody else's now
        with self._lock:
            self.free += 1
        self._room.release()


class Staged:
    """`runner` over a model in `count` stages; `loops` are the later ones'."""

    def __init__(
        self,
        folder: Path,
        count: int,
        *,
        dtype: str = "float32",
        page_tokens: int = 16,
        num_pages: int = 64,
    ) -> None:
        def load(stage: Stage) -> Model:
            return load_model(folder, device="cpu", dtype=dtype, stage=stage)

        whole = load(Stage(0, 1))
        self.pool = make_pool(whole, page_tokens=page_tokens, num_pages=num_pages)
        self.count = count - 1
        self.rows = [Rows() for _ in range(count)]
        stages = [Stage(i, count) for i in range(count)]
        passes = [
            StagePasses(load(stage), self._part(stage), stage, self.pool.storage)
            for stage in stages
        ]
        self.runner = PipelineRunner(passes[0], self.pool, whole.config, self.rows[0], self)
        self.loops = [
            StageLoop(passes[i + 1], self.rows[i + 1], self.runner.behind.hear)
            for i in range(self.count)
        ]
        for i, loop in enumerate(self.loops):
            self.rows[i].on_rows = loop.hand
        self.rows[-1].on_rows = self.runner.behind.hand
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), daemon=True) for loop in self.loops
        ]
        for thread in self._threads:
            thread.start()

    def _part(self, stage: Stage) -> KvPool:
        held = stage.layers(self.pool.layout.num_layers)
        layout = replace(self.pool.layout, num_layers=len(held), layer_start=held.start)
        storage = self.pool.storage[held.start : held.stop]
        return KvPool(layout, torch.device("cpu"), storage)

    def _run(self, loop: StageLoop) -> None:
        try:
            with torch.inference_mode():
                loop.run()
        except Exception as error:
            self.runner.behind.fall(StageError(f"{type(error).__name__}: {error}"))

    def tell(self, command: Command, stage: int | None = None) -> None:
        for loop in self.loops if stage is None else [self.loops[stage]]:
            loop.tell(command)

    def close(self) -> None:
        for loop in self.loops:
            loop.close()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    @property
    def is_empty(self) -> bool:
        """Nothing is anywhere in the pipeline."""
        return (
            len(self.runner.behind) == 0
            and all(rows.free == 3 for rows in self.rows)
            and all(not loop._entries for loop in self.loops)
        )
