"""The layers that a stage of a pipeline holds (stream pipeline parallelism, Mnemosyne section 4.3).

An instance may be a chain of stages, each with a run of the model's layers and their KV. The first
stage also embeds tokens and makes logits of the hidden states that the last stage returns. So the
embedding, which many models share with lm_head, is held once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from millrace.core.errors import ConfigError
from millrace.core.kv.layout import stage_layers
from millrace.engine.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage `index` of `count`."""

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def check(self, config: ModelConfig) -> None:
        """Raises ConfigError when the model has fewer layers than there are stages."""
        if config.num_layers < self.count:
            raise ConfigError(
                f"engine.stages is {self.count}; the model's {config.num_layers} layers allow at "
                f"most as many stages"
            )

    def layers(self, total: int) -> range:
        """Returns the stage's layers, of a model's `total`."""
        return stage_layers(total, self.index, self.count)

    def config(self, config: ModelConfig) -> ModelConfig:
        """Returns the stage's config: its own layers, counted from 0, instead of all."""
        held = self.layers(config.num_layers)
        moe = config.moe
        if moe is not None:
            moe = replace(moe, layers=moe.layers[held.start : held.stop])
        return replace(
            config,
            num_layers=len(held),
            sliding_windows=config.sliding_windows[held.start : held.stop],
            moe=moe,
        )


ALONE = Stage(0, 1)
