"""Whether decode steps begin before the tokens of the step before are on the host."""

from __future__ import annotations

import torch

from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError


def runs_ahead(config: EngineConfig, device: torch.device) -> bool:
    """Returns whether an engine's decode steps run ahead.

    Raises ConfigError where `decode_ahead` is on and the engine has several processes: there the
    first of them needs the tokens on the host.
    """
    is_alone = config.tensor_parallel == config.stages == 1
    if config.decode_ahead == "on" and not is_alone:
        raise ConfigError(
            f"engine.decode_ahead is 'on'; engine.tensor_parallel is {config.tensor_parallel} and "
            f"engine.stages {config.stages}, and both must be 1"
        )
    if config.decode_ahead == "auto":
        return is_alone and device.type == "cuda"
    return config.decode_ahead == "on"
