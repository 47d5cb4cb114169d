"""Puts an engine together: model, KV pool and runner, sized to the machine."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.core.kv.layout import KvLayout
from millrace.engine.device.graph_sizes import GraphSizes, describe, graph_sizes
from millrace.engine.errors import EngineDied
from millrace.engine.forward.local_runner import ModelRunner
from millrace.engine.forward.passes import Passes
from millrace.engine.forward.stage_passes import StagePasses
from millrace.engine.kv.pool import KvPool
from millrace.engine.kv_shape import KvShape, dtype_of, revised
from millrace.engine.model.config import ModelConfig
from millrace.engine.model.loader import Model, load_model, model_hash
from millrace.engine.parallel.follower import Beside
from millrace.engine.parallel.group_passes import load_ranks
from millrace.engine.parallel.member_calls import MemberCalls
from millrace.engine.parallel.member_pools import (
    MemberPools,
    agreed_pages,
    group_passes,
    has_own_pools,
    services,
)
from millrace.engine.parallel.rank_group import RankGroup
from millrace.engine.runner import Runner
from millrace.engine.sizing import compute_threads, pool_bytes
from millrace.grammar.matcher import Grammars
from millrace.model_folder import resolve_model
from millrace.profiles.cache import ProfileKey
from millrace_kernels import cpu_backend, determinism
from millrace_kernels.api import describe_backends
from millrace_kernels.determinism import Alike
from millrace_kernels.dispatch import rows_backend


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMemory:
    """A pool of KV pages for a model, with the model's weights (`Engine`) or without.

    `max_context_tokens`, the model's limit, counts prompt and output together. The KV of one
    request may lie in several pools.
    """

    folder: Path
    shape: ModelConfig  # of the whole model
    device: torch.device
    layout: KvLayout  # of all heads and layers
    pool: KvPool  # the record of pages; of several members, the leader's
    storage: torch.Tensor  # the KV that this process maps: of all members, or its own
    backends: str  # which backend computes which operators, for the log
    max_context_tokens: int
    members: MemberPools | None = None  # the others, if members have pools of their own

    @property
    def swap(self) -> MemberCalls | None:
        """To the swap buffers of other members with pools of their own."""
        return None if self.members is None else self.members.swap

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
        """Has `call` made, on any thread, when a rank or a later stage has died."""
        if self.runner.processes is not None:
            self.runner.processes.when_died(call)

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
    transport: Beside | None = None,
    devices: Sequence[str] = (),
) -> list[Engine]:
    """Opens `count` engines, in one stage, over the same weights. Each has a pool of its own, with
    an equal share of the memory that a single engine would get. Their KV never mixes with the KV of
    another `revision` of the model. `transport`: what moves the KV of ranks that have pools of
    their own. `devices`: of the ranks, see `RankGroup`. Otherwise as `open_engine`.
    """
    config = replace(config, stages=1)
    device = resolve_device(config.device)
    ranks = config.tensor_parallel
    if ranks > 1 and count > 1:
        raise ConfigError(
            f"engine.tensor_parallel is {ranks}; instances that share their weights can have 1"
        )
    own_pools = has_own_pools(config, device)
    threads = max(1, compute_threads(config) // ranks)
    torch.set_num_threads(threads)
    folder = resolve_model(model)
    alike = use_determinism(folder, config, device)
    group = None
    if ranks > 1:
        beside = services(transport) if own_pools else None
        group = RankGroup(
            ranks, device=str(device), devices=devices, threads=threads, beside=beside
        )
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
                alike=alike,
            )
        shape = KvShape.of_one_page(
            folder, config, device, model_hash=revised(loaded.hash, revision), dtype=loaded.dtype
        )
        if group is None:
            shape = shape.sized(pool_bytes(config, device, shape.least_bytes) // count)
        else:
            pages = agreed_pages(group, config, shape.least_bytes, shape.layout)
            shape = shape.with_pages(pages, config)
        layout, others = shape.layout, None
        if group is not None and own_pools:
            others = MemberPools.of(layout, [group.besides])
        graphs = graph_sizes(
            config, shape.model.head_dim, device, loaded.dtype, shape.max_context_tokens
        )
        return [
            engine_of(shape, _runner(loaded, layout, config, group, graphs), config, others)
            for _ in range(count)
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
    torch.set_num_threads(compute_threads(config))
    use_determinism(model, config, device)
    alone = replace(config, tensor_parallel=1, stages=1)
    shape = KvShape.of_one_page(model, alone, device, revision)
    shape = shape.sized(pool_bytes(config, device, shape.layout.pool_bytes))
    pool = KvPool(shape.layout, device=device)
    return KvMemory(
        folder=shape.folder,
        shape=shape.model,
        device=device,
        layout=shape.layout,
        pool=pool,
        storage=pool.storage,
        backends=describe_backends(),
        max_context_tokens=shape.max_context_tokens,
    )


def alike_of(model: str | Path, config: EngineConfig, device: torch.device) -> Alike:
    """Returns where rows get the same bits. Raises ConfigError for a device that can't, and
    ModelError as `load_model` does.
    """
    if device.type != "cpu":
        if config.deterministic == "on":
            raise ConfigError(
                f"engine.deterministic is on with {device}; it needs engine.device=cpu"
            )
        return Alike.NOWHERE
    if config.deterministic == "auto":
        whole = ModelConfig.from_folder(resolve_model(model))
        is_cheap = dtype_of(whole, config) == "bfloat16"
        return Alike.PASSES if is_cheap and cpu_backend.uses_vectors() else Alike.NOWHERE
    return Alike.GROUPS if config.deterministic == "on" else Alike.NOWHERE


def use_determinism(model: str | Path, config: EngineConfig, device: torch.device) -> Alike:
    """Sets the kernels of this process; returns `alike_of`, and raises as it does."""
    alike = alike_of(model, config, device)
    determinism.use(alike)
    return alike


def engine_of(
    shape: KvShape, runner: Runner, config: EngineConfig, members: MemberPools | None = None
) -> Engine:
    """Makes the engine of a runner over the pool of `shape`. `members`: `KvMemory.members`.

    Raises ConfigError where `config.attention_backend` can't compute the model's attention.
    """
    model = runner.model
    try:
        attention = runner.states.attention_backend()
    except ValueError as error:
        raise ConfigError(
            f"engine.attention_backend is {config.attention_backend!r}: {error}"
        ) from error
    rest = f"{rows_backend(model.device, model.dtype)}"
    rest += describe(config, model.config.head_dim, model.device, model.dtype)
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
        members=members,
    )


def _runner(
    model: Model,
    layout: KvLayout,
    config: EngineConfig,
    group: RankGroup | None,
    graphs: GraphSizes,
) -> Runner:
    """Makes a runner over new pools. `layout`: of all ranks' pools."""
    passes: Passes
    if group is None:
        pool = KvPool(layout, device=model.device)
        passes = StagePasses(model, pool, config.attention_backend, graphs=graphs)
    else:
        own = replace(layout, head_count=layout.part_heads, parts=1, copies=1)
        passes = group_passes(group, model, own, config)
    return ModelRunner(passes)


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
    device = resolve_device(config.device)
    alike = alike_of(folder, config, device)
    return ProfileKey(
        model_hash=model_hash(folder, load_format=config.load_format),
        device=processor_name(device),
        dtype=dtype_of(ModelConfig.from_folder(folder), config),
        threads=compute_threads(config),
        max_chunk_tokens=config.max_chunk_tokens,
        tensor_parallel=config.tensor_parallel,
        kernels=f"{cpu_backend.describe()}, {alike.name}" if device.type == "cpu" else "",
    )


def processor_name(device: torch.device) -> str:
    """The maker's name of the device, if the system knows it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
