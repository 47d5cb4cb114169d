"""Puts an engine together: model, KV pool and runner, sized to the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.core.kv.layout import KvLayout
from millrace.engine.errors import EngineDied
from millrace.engine.forward.local_runner import ModelRunner
from millrace.engine.forward.passes import Passes
from millrace.engine.forward.stage_passes import StagePasses
from millrace.engine.kv.pool import KvPool
from millrace.engine.model.config import ModelConfig
from millrace.engine.model.loader import Model, load_model, model_hash, resolve_model
from millrace.engine.parallel.group_passes import GroupPasses, load_ranks
from millrace.engine.parallel.kv_memory import new_memory
from millrace.engine.parallel.rank_group import RankGroup
from millrace.engine.runner import Runner
from millrace.grammar.matcher import Grammars
from millrace.profiles.cache import ProfileKey
from millrace_kernels.api import describe_backends
from millrace_kernels.dispatch import rows_backend

CPU_POOL_SHARE = 0.1  # of available memory: several workers share one machine
CPU_POOL_MOST_BYTES = 4 << 30
CUDA_POOL_SHARE = 0.85  # of the memory that the weights leave free


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMemory:
    """A pool of KV pages for a model, with the model's weights (`Engine`) or without.

    `max_context_tokens`, the model's limit, counts prompt and output together. The KV of one
    request may lie in several pools.
    """

    folder: Path
    shape: ModelConfig  # of the whole model
    device: torch.device
    layout: KvLayout  # of `storage`, all heads
    pool: KvPool  # the record of pages; of several ranks, rank 0's
    storage: torch.Tensor  # the KV that this process can read, of all ranks, for transfers
    backends: str  # which backend computes which operators, for the log
    max_context_tokens: int

    @property
    def pool_context_tokens(self) -> int:
        """The longest context that lies in this pool alone."""
        return min(self.max_context_tokens, self.layout.num_pages * self.layout.page_tokens)

    def check_integrity(self) -> None:
        """Raises IntegrityError when the pool's record is inconsistent."""
        self.pool.check_integrity()

    def when_died(self, call: Callable[[EngineDied], None]) -> None:
        """Has `call` made, on any thread, when a watched process of the engine has died. Memory
        alone has no such process."""

    def close(self) -> None:
        """Ends the processes of an engine. Memory alone is freed with its last user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine(KvMemory):
    """A loaded model with its memory."""

    runner: Runner
    grammars: Grammars

    def check_integrity(self) -> None:
        """Raises IntegrityError when the pool's record does not add up, or an idle engine has a
        pass in flight."""
        KvMemory.check_integrity(self)
        if self.runner.in_flight is not None:
            self.runner.in_flight.check_integrity()

    def when_died(self, call: Callable[[EngineDied], None]) -> None:
        """Has `call` made, on any thread, when a later stage has died.

        The next pass finds a dead rank out.
        """
        if self.runner.in_flight is not None:
            self.runner.in_flight.when_died(call)

    def close(self) -> None:
        """Ends the other ranks or stages, if there are any."""
        if self.runner.processes is not None:
            self.runner.processes.close()


def open_engine(
    model: str | Path, config: EngineConfig, progress: Callable[[float], None] | None = None
) -> Engine:
    """Loads `model` (a folder or a hub id) and sizes its KV pool.

    `progress` is called with the share of weights read, 0 to 1.
    Raises ModelError for a model that can't be served and ConfigError for settings it can't meet.
    """
    return open_engines(model, config, 1, progress)[0]


def open_engines(
    model: str | Path,
    config: EngineConfig,
    count: int,
    progress: Callable[[float], None] | None = None,
    revision: str = "",
) -> list[Engine]:
    """Opens `count` engines over the same weights. Each has a pool of its own, with an equal share
    of the memory that a single engine would get. Their KV never mixes with the KV of another
    `revision` of the model. Otherwise as `open_engine`.
    """
    device = resolve_device(config.device)
    ranks = config.tensor_parallel
    if ranks > 1 and count > 1:
        raise ConfigError(
            f"engine.tensor_parallel is {ranks}; instances that share their weights can have 1"
        )
    threads = max(1, (config.threads or len(os.sched_getaffinity(0))) // ranks)
    torch.set_num_threads(threads)
    folder = resolve_model(model)
    group = None
    if ranks > 1:
        group = RankGroup(ranks, device=str(device), threads=threads)
    try:
        if group is None:
            loaded = load_model(
                folder,
                device=str(device),
                dtype=config.dtype,
                load_format=config.load_format,
                progress=progress,
            )
        else:
            loaded = load_ranks(
                group,
                folder,
                dtype=config.dtype,
                load_format=config.load_format,
                progress=progress,
            )
        whole = ModelConfig.from_folder(folder)
        context = _context(config, whole, folder)
        one_page = _one_page(
            whole,
            config,
            model_hash=_revised(loaded.hash, revision),
            dtype=loaded.dtype,
            parts=min(ranks, whole.num_kv_heads),
        )
        size = pool_bytes(config, device, context * one_page.bytes_per_token)
        layout = _sized(one_page, size // count)
        shape = KvShape(folder=folder, model=whole, layout=layout, max_context_tokens=context)
        return [
            engine_of(shape, _runner(loaded, layout, config, group), config) for _ in range(count)
        ]
    except BaseException:
        if group is not None:
            group.close()
        raise


def open_kv_only(model: str | Path, config: EngineConfig, revision: str = "") -> KvMemory:
    """Opens a KV pool without the model's weights, for attention over other instances' KV.

    The pool's pages have one part, whatever `tensor_parallel` is at instances with the weights.
    Reads config.json and the names of the weights. Raises as `open_engine` does.
    """
    device = resolve_device(config.device)
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    folder = resolve_model(model)
    whole = ModelConfig.from_folder(folder)
    one_page = _one_page(
        whole,
        config,
        model_hash=_revised(model_hash(folder, load_format=config.load_format), revision),
        dtype=getattr(torch, whole.dtype if config.dtype == "auto" else config.dtype),
        parts=1,
    )
    layout = _sized(one_page, pool_bytes(config, device, one_page.pool_bytes))
    pool = KvPool(layout, device=device)
    return KvMemory(
        folder=folder,
        shape=whole,
        device=device,
        layout=layout,
        pool=pool,
        storage=pool.storage,
        backends=describe_backends(),
        max_context_tokens=_context(config, whole, folder),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """A model's shape and the layout of its KV pool, known before any weight is read."""

    folder: Path
    model: ModelConfig
    layout: KvLayout
    max_context_tokens: int

    @staticmethod
    def of(model: str | Path, config: EngineConfig, revision: str = "") -> KvShape:
        """Returns the shape that `open_engine` would use. Raises as `open_engine` does."""
        folder = resolve_model(model)
        whole = ModelConfig.from_folder(folder)
        context = _context(config, whole, folder)
        one_page = _one_page(
            whole,
            config,
            model_hash=_revised(model_hash(folder, load_format=config.load_format), revision),
            dtype=getattr(torch, whole.dtype if config.dtype == "auto" else config.dtype),
            parts=min(config.tensor_parallel, whole.num_kv_heads),
        )
        size = pool_bytes(config, resolve_device(config.device), context * one_page.bytes_per_token)
        return KvShape(
            folder=folder,
            model=whole,
            layout=_sized(one_page, size),
            max_context_tokens=context,
        )


def engine_of(shape: KvShape, runner: Runner, config: EngineConfig) -> Engine:
    """Makes the engine of a runner over the pool of `shape`.

    Raises ConfigError where `config.attention_backend` can't compute the model's attention.
    """
    model = runner.model
    try:
        attention = runner.states.attention_backend()
    except ValueError as error:
        raise ConfigError(
            f"engine.attention_backend is {config.attention_backend!r}: {error}"
        ) from error
    rest = rows_backend(model.device, model.dtype)
    return Engine(
        folder=shape.folder,
        shape=shape.model,
        device=model.device,
        layout=shape.layout,
        pool=runner.pool,
        storage=runner.storage if config.tensor_parallel > 1 else runner.storage[0],
        runner=runner,
        grammars=Grammars(shape.folder, shape.model.vocab_size, shape.model.eos_token_ids),
        backends=f"attention {attention}, linears and sampling {rest}; {describe_backends()}",
        max_context_tokens=shape.max_context_tokens,
    )


def _context(config: EngineConfig, model: ModelConfig, folder: Path) -> int:
    context = config.max_context_tokens or model.max_context_tokens
    if context > model.max_context_tokens:
        raise ConfigError(
            f"engine.max_context_tokens is {context}; {folder} allows at most "
            f"{model.max_context_tokens}"
        )
    return context


def _revised(model_hash: str, revision: str) -> str:
    return f"{model_hash}@{revision}" if revision else model_hash


def _one_page(
    whole: ModelConfig, config: EngineConfig, *, model_hash: str, dtype: torch.dtype, parts: int
) -> KvLayout:
    """The layout of one page: all heads of the whole model, in `parts`."""
    return KvLayout(
        model_hash=model_hash,
        dtype=str(dtype).removeprefix("torch."),
        num_layers=whole.num_layers,
        num_kv_heads=whole.num_kv_heads,
        head_dim=whole.head_dim,
        page_tokens=config.page_tokens,
        head_start=0,
        head_count=whole.num_kv_heads,
        num_pages=1,
        parts=parts,
    )


def _runner(
    model: Model, layout: KvLayout, config: EngineConfig, group: RankGroup | None
) -> Runner:
    """Makes a runner over new pools. `layout`: of all ranks' pools."""
    passes: Passes
    if group is None:
        pool = KvPool(layout, device=model.device)
        passes = StagePasses(model, pool, config.attention_backend)
    else:
        own = replace(layout, head_count=layout.part_heads, parts=1)
        passes = _group_passes(group, model, own, config.attention_backend)
    return ModelRunner(passes)


def _group_passes(group: RankGroup, model: Model, layout: KvLayout, backend: str) -> GroupPasses:
    """Makes the passes of a group. On the host the ranks share one memory, for rank 0 to send."""
    if group.device.type != "cpu":
        return GroupPasses(group, model, layout, backend)
    handle = new_memory(layout)
    try:
        return GroupPasses(group, model, layout, backend, handle=handle)
    finally:
        os.close(handle)


def resolve_device(name: str) -> torch.device:
    """Returns the device of a name: for `auto` CUDA if there is a device, else the CPU.

    Raises ConfigError for an unusable name.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"engine.device is {name!r}; it must be auto, cpu or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"engine.device is {name!r}, but this process sees no CUDA device")
    return device


def profile_key(model: str | Path, config: EngineConfig) -> ProfileKey:
    """Returns the key of a profile of `model` under these settings. Loads no weights.

    Raises ModelError and ConfigError as `open_engine` does.
    """
    folder = resolve_model(model)
    dtype = ModelConfig.from_folder(folder).dtype if config.dtype == "auto" else config.dtype
    return ProfileKey(
        model_hash=model_hash(folder, load_format=config.load_format),
        device=processor_name(resolve_device(config.device)),
        dtype=dtype,
        threads=config.threads or len(os.sched_getaffinity(0)),
        max_chunk_tokens=config.max_chunk_tokens,
        tensor_parallel=config.tensor_parallel,
    )


def processor_name(device: torch.device) -> str:
    """The maker's name of the device, if the system knows it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


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
    """Bytes of memory available without swapping, as the kernel estimates."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _sized(one_page: KvLayout, size_bytes: int) -> KvLayout:
    pages = size_bytes // one_page.pool_bytes
    if pages < 1:
        raise ConfigError(
            f"engine.kv_bytes is {size_bytes}; one page of this model takes {one_page.pool_bytes}"
        )
    return replace(one_page, num_pages=pages)
