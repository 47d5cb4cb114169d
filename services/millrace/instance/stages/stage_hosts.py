"""Where the stages of an instance run that are not on this machine."""

from __future__ import annotations

import torch

from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.engine.parallel.rank_group import devices_of_ranks


def stage_addresses(config: EngineConfig) -> tuple[str, ...]:
    """Returns the address of each later stage's host; none if all stages are on this machine.

    Raises ConfigError when there are more or fewer addresses than later stages.
    """
    addresses = tuple(one.strip() for one in config.stage_hosts.split(",") if one.strip())
    if addresses and len(addresses) != config.stages - 1:
        raise ConfigError(
            f"engine.stage_hosts has {len(addresses)} addresses and engine.stages is "
            f"{config.stages}; every stage after the first needs one"
        )
    return addresses


def devices_of_members(config: EngineConfig, first: torch.device) -> tuple[str, ...]:
    """Returns the devices of all members, stage after stage: from `first` on, or, on other hosts,
    as `HOST:PORT/TYPE/RANK`, which that host replaces by its own.
    """
    ranks = config.tensor_parallel
    if not (addresses := stage_addresses(config)):
        return devices_of_ranks(first, config.stages * ranks)
    numbers = ["" if first.type == "cpu" else f"/{rank}" for rank in range(ranks)]
    there = [f"{one}/{first.type}{number}" for one in addresses for number in numbers]
    return (*devices_of_ranks(first, ranks), *there)
