"""Parts of an experiment that are computed side by side, and kept in a file as they end.

A run that was stopped goes on with the parts that the file has. A part is known by its name and by
a digest of all that its result depends on, so a file of other code or other traffic is no danger:
its parts are computed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import millrace
from millrace.container_limits import usable_cores
from millrace.core.errors import ConfigError, reason_of
from millrace.experiments.outcome import Announce
from millrace.sim.results.report import write_json

_DIGITS = 16  # hexadecimal, of a digest


@dataclass(frozen=True, slots=True)
class Job:
    """A part: `compute(*of)` returns a JSON value, which depends on `digest` alone."""

    digest: str
    compute: Callable[..., Any]
    of: tuple[Any, ...]


class Cells:
    """The finished parts of an experiment. Without a path, they are not kept."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigError for a file that holds something else, and for a missing folder."""
        self._path = path
        self._found: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._found = _read(path)
        elif path is not None and not path.parent.is_dir():
            raise ConfigError(f"--resume {path}: its folder does not exist")

    def fill(self, jobs: Mapping[str, Job], announce: Announce) -> dict[str, Any]:
        """Returns the jobs' results by name; as many are computed at a time as there are cores."""
        missing = {name: job for name, job in jobs.items() if not self._has(name, job)}
        done = len(jobs) - len(missing)
        if missing:
            cores = usable_cores()
            pool = ProcessPoolExecutor(cores, mp_context=get_context("spawn"))
            try:
                names = {pool.submit(job.compute, *job.of): name for name, job in missing.items()}
                for one in as_completed(names):
                    name = names[one]
                    self._keep(name, missing[name], one.result())
                    done += 1
                    announce(f"{done} of {len(jobs)}: {name}")
            finally:
                pool.shutdown(cancel_futures=True)
        return {name: self._found[name]["result"] for name in jobs}

    def _has(self, name: str, job: Job) -> bool:
        return self._found.get(name, {}).get("digest") == job.digest

    def _keep(self, name: str, job: Job, result: Any) -> None:  # noqa: ANN401 - a JSON value
        self._found[name] = {"digest": job.digest, "result": result}
        if self._path is not None:
            beside = self._path.with_name(f"{self._path.name}.new")
            write_json(beside, {"parts": self._found})
            beside.replace(self._path)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--resume {path}: {reason_of(error)}") from error
    parts = document.get("parts") if isinstance(document, dict) else None
    if not isinstance(parts, dict) or not all(
        isinstance(part, dict) and {"digest", "result"} <= part.keys() for part in parts.values()
    ):
        raise ConfigError(f"--resume {path}: it does not hold the parts of an experiment")
    return parts


def digest(*parts: object) -> str:
    """Returns a digest of the texts of the parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:_DIGITS]


@cache
def code(paths: tuple[str, ...], leaving_out: str = "") -> str:
    """Returns a digest of the package's files at the paths, but for those in one folder.

    paths, leaving_out: relative to the package.
    """
    root = Path(millrace.__file__).parent
    seen = hashlib.sha256()
    for file in sorted(_files(root / path for path in paths)):
        name = file.relative_to(root).as_posix()
        if leaving_out and name.startswith(f"{leaving_out}/"):
            continue
        seen.update(f"{name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return seen.hexdigest()[:_DIGITS]


def _files(paths: Iterable[Path]) -> Iterable[Path]:
    """Lists the sources and data at the paths, without what is built of them."""
    for path in paths:
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file() and file.suffix not in (".pyc", ".so"):
                yield file
