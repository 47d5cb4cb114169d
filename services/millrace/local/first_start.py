"""Measures a stack's model before its first start, as a prefill instance would compute.

The measurement runs in a process of its own, which shows its progress and frees its memory. A note
beside the profile, keyed without loading torch, records it, so that later starts do not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.home import expanded
from millrace.local.processes.child import ending_with_this
from millrace.profiles.cache import ProfileCache, write_whole

BUDGET_S = 4.0  # for one instance; the same again for groups


async def profile_first(
    model: str,
    engine: EngineConfig,
    arguments: Sequence[str],
    group_sizes: Sequence[int] = (),
    *,
    budget_s: float = 0.0,
) -> None:
    """Runs `millrace profile --if-missing` unless it was run for the same before.

    engine, arguments: the prefill instances' settings, and their form on the command line.
    group_sizes: the sizes of groups to measure, too.
    budget_s: 0 means `BUDGET_S`. When measuring fails, its process has printed the reason, and the
    instances fit their prefill times themselves.
    """
    budget_s = budget_s or BUDGET_S
    if group_sizes:
        budget_s *= 2
        arguments = [*arguments, "--sp", ",".join(map(str, group_sizes))]
    note = _note(model, engine, arguments)
    if _still_holds(note):
        return
    command = [sys.executable, "-m", "millrace", "profile", model, "--if-missing"]
    process = await asyncio.create_subprocess_exec(
        *ending_with_this([*command, "--budget-s", str(budget_s), *arguments], signal.SIGTERM),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode == 0:
        with contextlib.suppress(ConfigError):
            write_whole(note, output.decode().strip().splitlines()[-1])


def _note(model: str, engine: EngineConfig, arguments: Sequence[str]) -> Path:
    """Returns the note's path: each change of a setting or a file of the model changes it; a hub id
    has no files.
    """
    folder = expanded(model)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    name = hashlib.sha256(f"{model} {stats} {engine} {list(arguments)}".encode()).hexdigest()[:32]
    return ProfileCache(engine.profile_cache).folder / f"{name}.measured"


def _still_holds(note: Path) -> bool:
    """Returns whether the profile that a note names exists."""
    try:
        return Path(note.read_text("utf-8")).is_file()
    except (OSError, ValueError):
        return False
