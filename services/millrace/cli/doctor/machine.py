"""What `millrace doctor` checks on its own machine."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Iterator

from millrace.cli.doctor.findings import FAILURE, OK, WARNING, Finding
from millrace.container_limits import spare_bytes, usable_cores
from millrace.core.config import Config
from millrace.file_limit import most_clients, raise_file_limit
from millrace.local.devices import gpus_there
from millrace.thread_limit import ADVICE, WANTED, startable_threads
from millrace.version import version


def machine() -> Iterator[Finding]:
    """Yields what this machine has: versions, cores, open files, threads, NIXL and GPUs."""
    versions = f"millrace {version()}, Python {platform.python_version()}"
    yield Finding(OK, "this machine", f"{versions}, {_room()}")
    yield _files()
    yield _threads()
    if importlib.util.find_spec("torch") is None:
        yield Finding(OK, "engine", "not installed here: fine for a machine without instances")
        return
    yield from _engine()


def _room() -> str:
    """Returns the cores and the memory, and what a container leaves of them."""
    there, usable = os.cpu_count() or 1, usable_cores()
    cores = f"{usable} cores" if usable == there else f"{usable} of {there} cores"
    spare = spare_bytes()
    return cores if spare is None else f"{cores}, {spare / 2**30:.1f} GiB left by its memory limit"


def _files() -> Finding:
    files = raise_file_limit()
    most = most_clients(files)
    measured = f"{files} at most: {most} clients of a proxy"
    if most >= Config().proxy.max_inflight:
        return Finding(OK, "open files", measured)
    return Finding(
        WARNING, "open files", measured, "raise the hard limit: ulimit -Hn, LimitNOFILE of systemd"
    )


def _threads() -> Finding:
    found = startable_threads()
    if found == WANTED:
        return Finding(OK, "threads", f"{WANTED} more can start, as a service needs")
    measured = f"{found} more can start, and a service needs {WANTED}"
    return Finding(FAILURE, "threads", measured, ADVICE)


def _engine() -> Iterator[Finding]:
    import torch

    from millrace.transfer.transport.nixl import library

    yield Finding(OK, "torch", torch.__version__)
    build = library.build()
    if build.fits:
        yield Finding(OK, "NIXL", str(build))
    else:
        yield Finding(
            WARNING, "NIXL", str(build), f"install {build.wanted}; KV in GPU memory can't travel"
        )
    there, seen = gpus_there(), torch.cuda.device_count()
    if there == seen:
        yield Finding(OK, "GPUs", f"{seen}")
    else:
        yield Finding(
            FAILURE,
            "GPUs",
            f"the machine has {there}, torch sees {seen}",
            "install a torch that is built for CUDA, or check the driver by nvidia-smi",
        )
