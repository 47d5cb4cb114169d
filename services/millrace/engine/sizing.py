"""Bytes for KV pools, and threads: as configured, or a share of what the machine has."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

from millrace.container_limits import spare_bytes, usable_cores
from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError

CPU_POOL_SHARE = 0.1  # of available memory: several workers share one machine
CPU_POOL_MOST_BYTES = 4 << 30
CUDA_POOL_SHARE = 0.85  # of the memory that the weights leave free


def compute_threads(config: EngineConfig) -> int:
    """Threads of all ranks: as configured, else OMP_NUM_THREADS, else the cores that this process
    may use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # of the outermost level
    usual = int(wanted) if wanted.isdecimal() else 0
    return config.threads or usual or usable_cores()


def pool_bytes(config: EngineConfig, device: torch.device, least_bytes: int) -> int:
    """Bytes for the KV pool: as configured, else a share of the free memory; on a CPU at least
    `least_bytes`."""
    if config.kv_bytes:
        return config.kv_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
        return cuda_pool_bytes(free, total, own, config.device_share)
    share = min(int(available_bytes() * CPU_POOL_SHARE), CPU_POOL_MOST_BYTES)
    return max(share, least_bytes)


def member_pages(
    config: EngineConfig,
    device: torch.device,
    least_bytes: int,
    *,
    page_bytes: int,
    whole_page_bytes: int,
    sharers: int,
) -> int:
    """Pages for the pool of one member of an instance, on `device`.

    What is configured, and memory of the host, is for the pools of all members together, in which
    a page has `whole_page_bytes`; a GPU's memory is for the `sharers` members that are on it. A
    page has `page_bytes` in the member's own pool. Otherwise as `pool_bytes`.
    """
    size = pool_bytes(config, device, least_bytes)
    if device.type == "cuda" and not config.kv_bytes:
        return size // sharers // page_bytes
    return size // whole_page_bytes


def cuda_pool_bytes(free: int, total: int, own: int, share: float) -> int:
    """Bytes for the KV pool on a GPU of `total` bytes, of which this process has taken `own`.

    Where other processes share the device, memory beyond `share` is theirs, even while it is free.
    Raises ConfigError when the weights leave nothing of the share.
    """
    mine = free if share == 1.0 else min(free, int(total * share) - own)
    if mine <= 0:
        raise ConfigError(
            f"engine.device_share is {share:g}; of {total} bytes the weights take {own}, and "
            f"{free} are free: nothing is left for KV"
        )
    return int(mine * CUDA_POOL_SHARE)


def available_bytes() -> int:
    """Bytes of memory available without swapping, as the kernel estimates, or as many as the limits
    of the process's container and of its address space leave."""
    available = _estimated_bytes()
    if (spare := spare_bytes()) is not None:
        available = min(available, spare)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return available
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return max(0, min(available, limit - mapped))


def _estimated_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
