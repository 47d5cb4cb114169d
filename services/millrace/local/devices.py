"""Assigns GPUs, and shares of their memory, to the instances of a local stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from millrace.core.arithmetic import ceil_div
from millrace.core.errors import ConfigError

_DEVICE_FILES = Path("/dev")


class DevicePool:
    """Lends GPUs to instances, `each` of them per instance; an instance gives its GPUs back.

    Devices have the names of CUDA_VISIBLE_DEVICES. Without devices, instances get none: they
    compute on CPUs.
    """

    def __init__(
        self, devices: Sequence[str], instances: Mapping[str, int], *, each: int, shared: bool
    ) -> None:
        """`instances`: the most instances at any time, by role.

        Raises ConfigError when there are too few devices and they can't be shared, or fewer than
        one instance needs.
        """
        self._each = each
        self._shared = shared
        self._holders = dict.fromkeys(devices, 0)
        self._held: dict[str, tuple[str, ...]] = {}
        needed = each * sum(instances.values())
        self._most = ceil_div(needed, len(devices)) if devices else 1  # instances on each device
        if not devices:
            return
        there = (
            f"{len(devices)} {'is' if len(devices) == 1 else 'are'} there ({', '.join(devices)})"
        )
        if each > len(devices):
            raise ConfigError(f"an instance needs {each} GPUs; {there}")
        if needed > len(devices) and not shared:
            fleet = " + ".join(f"{count} {role}" for role, count in instances.items() if count)
            raise ConfigError(
                f"{fleet} instances with {each} GPU{'s' * (each > 1)} each need {needed}; {there}. "
                "Start fewer instances, name more with --devices, or share them: --share-devices"
            )

    @property
    def memory_share(self) -> float:
        """Returns one instance's share of each device's memory, for the most instances at any
        time.
        """
        return 1 / max(1, self._most)

    def take(self, instance: str) -> tuple[str, ...]:
        """Returns the least shared devices, in order. Raises ConfigError when none is free."""
        if not self._holders:
            return ()
        least = sorted(self._holders, key=lambda device: self._holders[device])[: self._each]
        if not self._shared and any(self._holders[device] for device in least):
            raise ConfigError(f"{instance} needs {self._each} GPUs, and no more are free")
        chosen = tuple(device for device in self._holders if device in least)
        for device in chosen:
            self._holders[device] += 1
        self._held[instance] = chosen
        return chosen

    def give_back(self, instance: str) -> None:
        """Takes back an instance's devices, if it has any."""
        for device in self._held.pop(instance, ()):
            self._holders[device] -= 1


def device_names(option: str, visible: str | None, *, device: str, torch_cuda: str) -> list[str]:
    """Returns the devices that instances may use.

    `option` is the command line's list, else CUDA_VISIBLE_DEVICES (`visible`), else all devices of
    the system. Empty when `device`, the setting, or a torch without CUDA excludes them. Raises
    ConfigError when excluded devices are asked for, or a device is named twice.
    """
    uses_gpus = device != "cpu" and bool(torch_cuda)
    if option and not uses_gpus:
        why = "engine.device is cpu" if device == "cpu" else "torch is built without CUDA"
        raise ConfigError(f"--devices {option!r}: {why}")
    if not uses_gpus:
        return []
    if option or visible is not None:
        names = [name.strip() for name in (option or visible or "").split(",") if name.strip()]
    else:
        names = [str(i) for i in range(gpus_there())]
    if device.startswith("cuda:"):  # one device, by its index
        place = int(device.removeprefix("cuda:"))
        names = names[place : place + 1]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--devices names {', '.join(sorted(twice))} twice")
    return names


def gpus_there(folder: Path = _DEVICE_FILES) -> int:
    """Returns the number of NVIDIA GPUs of this machine or container, by their device files."""
    names = (path.name.removeprefix("nvidia") for path in folder.glob("nvidia*"))
    return sum(name.isdecimal() for name in names)
