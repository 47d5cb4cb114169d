"""Runs the parts of `millrace bench gpu` one after another, each in a process of its own.

A part that fails, hangs or crashes the device's context ends with its process, and the next part
begins with a new one.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch

from millrace.bench.gpu.command import LIMITS_S, Settings
from millrace.bench.gpu.document import PartReport, Report, Status, Versions
from millrace.bench.gpu.part import Found
from millrace.core.errors import ConfigError
from millrace.engine.assembly import processor_name, resolve_device
from millrace.engine.sizing import available_bytes
from millrace.version import version

_CPU_PATIENCE: Final = 6.0
"""Limits without a GPU are so many times as long: the machine may be busy."""

_LEAST_S: Final = 5.0
"""Seconds left below which a part does not begin: it only loads torch in them."""

_TAIL: Final = 1500
"""Characters of a failed part's output that the report keeps."""


def run(
    settings: Settings,
    *,
    on_progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Any]:
    """Runs the parts and returns the report as a JSON-ready document.

    Raises ConfigError when there is no such device, or `source` is no source tree.
    """
    device = resolve_device(settings.device)
    source = Path(settings.source)
    if not (source / "tests" / "kernels").is_dir():
        raise ConfigError(f"--source is {settings.source}; it must be Millrace's source tree")
    patience = 1.0 if device.type == "cuda" else _CPU_PATIENCE
    end_s = time.perf_counter() + patience * settings.limit_s
    parts = []
    for number, name in enumerate(settings.parts):
        on_progress(number, len(settings.parts), name)
        left_s = end_s - time.perf_counter()
        if left_s < _LEAST_S:
            parts.append(_without_time(name))
            continue
        parts.append(run_part(name, device, source, min(left_s, patience * LIMITS_S[name])))
    on_progress(len(parts), len(parts), "done")
    return _report(device, parts).model_dump()


def run_part(name: str, device: torch.device, source: Path, limit_s: float) -> PartReport:
    """Runs one part for at most `limit_s` seconds, then ends its processes."""
    begun_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "found.json", Path(folder) / "log"
        command = [sys.executable, "-m", "millrace.bench.gpu.part", name, str(device)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, str(source.resolve()), str(out)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = _wait(process, limit_s)
        found = Found.model_validate_json(out.read_bytes()) if out.exists() else Found()
        reason = _reason(code, limit_s, found, log.read_text(errors="replace"))
    return PartReport(
        name=name,
        status=status_of(found, code),
        seconds=time.perf_counter() - begun_s,
        limit_s=limit_s,
        reason=reason,
        findings=found.findings,
        figures=found.figures,
    )


def status_of(found: Found, code: int | None) -> Status:
    """Returns a part's status from its results and the code of its process (None: ran too long).

    A part that checked nothing, measured nothing and gives no reason has failed.
    """
    if code != 0 or not all(finding.passed for finding in found.findings):
        return "failed"
    if found.skipped:
        return "skipped"
    return "passed" if found.findings or found.figures else "failed"


def _without_time(name: str) -> PartReport:
    return PartReport(
        name=name, status="skipped", seconds=0.0, limit_s=0.0, reason="no time was left: --limit-s"
    )


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Returns the process's code; None if it ran too long. Its whole session is ended then."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _reason(code: int | None, limit_s: float, found: Found, log: str) -> str:
    if code is None:
        return f"it ran longer than {limit_s:g} s; its output ends: {log[-_TAIL:]}"
    if code:
        return f"its process ended with code {code}: {log[-_TAIL:]}"
    return found.skipped


def _report(device: torch.device, parts: Iterable[PartReport]) -> Report:
    is_cuda = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if is_cuda else ()
    return Report(
        device=processor_name(device),
        device_type="cuda" if is_cuda else "cpu",
        capability=".".join(map(str, capability)),
        memory_bytes=torch.cuda.mem_get_info(device)[1] if is_cuda else available_bytes(),
        date=datetime.now(UTC).date().isoformat(),
        versions=Versions(
            millrace=version(),
            python=platform.python_version(),
            torch=torch.__version__,
            cuda=str(torch.version.cuda or ""),
            triton=_version("triton"),
            flashinfer=_version("flashinfer-python"),
            nixl=_version("nixl-cu13") or _version("nixl-cu12"),
        ),
        parts=list(parts),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
