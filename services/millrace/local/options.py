"""What a local stack consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from millrace.container_limits import usable_cores
from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.local.devices import DevicePool


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """The services that `millrace up` starts; colocated instances replace prefill and decode.

    `settings` (`section.field=value`) go to every service. `role_settings` go to the instances of
    one role and take precedence. With `profile`, the engine's settings, a model that was never
    measured here is measured before the services start. Each of `more` models, with its name, gets
    a scheduler and instances of its own, as many as the first model has.
    """

    model: str
    model_name: str = ""
    prefill: int = 2
    decode: int = 1
    colocated: int = 0
    colocation: str = "pair"  # their --role
    kvp: int = 0
    schedulers: int = 1  # one leads, the others stand by
    host: str = "127.0.0.1"
    port: int = 8080
    redis: str = ""  # URL; empty: a Redis of the stack's own
    files: str = ""  # files.url; empty: a folder of the stack's own, beside its own Redis
    metrics_port: int = 0  # of the first service; the others have the next ones
    tls: bool = False  # between the services, by certificates of the stack's own
    logs: Path | None = None  # a folder for the services' logs, which stays; None: the stack's own
    config: Path | None = None
    settings: Sequence[str] = ()
    role_settings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    threads: int = 0
    start_timeout_s: float = 600.0
    profile: EngineConfig | None = None
    devices: Sequence[str] = ()  # GPUs for instances; empty: CPUs
    devices_each: int = 1
    share_devices: bool = False
    most: Mapping[str, int] = field(default_factory=dict)  # instances by role, autoscaled
    record: Path | None = None  # the file to which the scheduler records the run
    more: Sequence[tuple[str, str]] = ()

    def models(self) -> list[tuple[str, str]]:
        """Returns every model with its name for clients. Raises ConfigError if two have the same.

        A single model may have an empty name: then the folder's name is its name.
        """
        if not self.more:
            return [(self.model, self.model_name)]
        pairs = [(self.model, self.model_name), *self.more]
        named = [(model, name or Path(model).resolve().name) for model, name in pairs]
        names = [name for _, name in named]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"two models have the name {twice[0]!r}; give them other names")
        return named

    @property
    def compute_threads(self) -> int:
        """Returns the compute threads of each instance."""
        return self.threads or max(1, usable_cores() // 2)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Returns the powers of two of instances that have the machine's cores to themselves; empty
        with GPUs.

        On devices of their own, groups' times are estimated from the times of one instance.
        """
        most = 0 if self.colocated else max(self.prefill, self.most.get("prefill", 0))
        if self.devices:
            return ()
        most = min(most, usable_cores() // self.compute_threads)
        return tuple(1 << power for power in range(1, most.bit_length()))

    @property
    def fleet(self) -> dict[str, int]:
        """Returns the instances by role."""
        fleet = {"prefill": self.prefill, "decode": self.decode}
        if self.colocated:
            fleet = {"colocated": self.colocated}
        return {**fleet, "kvp": self.kvp} if self.kvp else fleet

    @property
    def common_arguments(self) -> list[str]:
        """Returns the arguments that configure every service."""
        named = [] if self.config is None else ["--config", str(self.config)]
        return named + as_arguments(*self.settings)

    def engine_settings(self, role: str) -> list[str]:
        """Returns the further arguments of the instances of a role."""
        own = self.role_settings.get(role, ())
        if (share := self.device_pool().memory_share) < 1:
            own = [f"engine.device_share={share:.4f}", *own]
        return as_arguments(f"engine.threads={self.compute_threads}", *own)

    def device_pool(self) -> DevicePool:
        """Makes the pool of devices. Raises ConfigError when the devices do not suffice."""
        most = {**self.fleet, **self.most}
        return DevicePool(
            self.devices,
            {role: count * (1 + len(self.more)) for role, count in most.items()},
            each=self.devices_each,
            shared=self.share_devices,
        )


def as_arguments(*settings: str) -> list[str]:
    """Returns the arguments that set these settings (`section.field=value`)."""
    return [argument for setting in settings for argument in ("--set", setting)]
