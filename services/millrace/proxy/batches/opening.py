"""Opens the files and batches that a configuration names."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable

from millrace.core.config import Config
from millrace.home import of_user, temporary_folder
from millrace.proxy.batches.service import Batches
from millrace.proxy.batches.tools import Tools
from millrace.proxy.files.store import Files
from millrace.proxy.metrics import BatchMetrics
from millrace.state.blobs import Blobs
from millrace.state.open import in_memory, open_deadlines, open_records

DEFAULT_FOLDER = "~/.local/share/millrace/files"


def open_files(config: Config) -> Files:
    """Raises ConfigError for a URL that no backend can open."""
    folder = None
    url = config.files.url
    if not url and in_memory(config.store):
        # The records end with this process, so the bytes do, too.
        folder = temporary_folder() / f"millrace-files-{uuid.uuid4().hex}"
        url = str(folder)
    elif not url:
        url = str(of_user(DEFAULT_FOLDER))
    return Files(
        open_records(config.store, _kind(config, "file")),
        open_deadlines(config.store, _kind(config, "file")),
        Blobs(url),
        config.files,
        unix_s,
        folder,
    )


def open_batches(
    config: Config,
    files: Files,
    *,
    owner: str,
    is_ready: Callable[[str], bool],
    check_model: Callable[[str], object],
    metrics: BatchMetrics,
) -> Batches:
    """`owner`, `is_ready` and `check_model` are as in `Tools`."""
    return Batches(
        Tools(
            records=open_records(config.store, _kind(config, "batch")),
            files=files,
            config=config.batches,
            owner=owner,
            clock=unix_s,
            is_ready=is_ready,
            check_model=check_model,
            most_body_bytes=config.proxy.max_body_bytes,
            slots=asyncio.Semaphore(config.batches.max_inflight),
            metrics=metrics,
        )
    )


def _kind(config: Config, name: str) -> str:
    """Returns the kind of records that the proxies of one group have in common."""
    return f"{name}:{config.files.group}" if config.files.group else name


def unix_s() -> float:
    """Returns Unix time, s."""
    return time.time_ns() / 1e9
