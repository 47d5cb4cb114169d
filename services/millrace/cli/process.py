"""Starts and ends the process of a command: settings, logging, event loop, one-line errors."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.core.errors import PREFIX, MillraceError, reason_of

if TYPE_CHECKING:
    from millrace.core.config import Config

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
#: What a write says where nothing more fits.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def configure(path: Path | None, settings: list[str], service: str) -> Config:
    """Returns the config tree; sets up the process's logging and TLS.

    No other function reads the environment.
    """
    from millrace.core.config import load_config
    from millrace.telemetry.log import setup_logging

    with plain_errors():
        tree = _with_cache(load_config(path, [*_environment(), *settings]))
        if tree.tls.enabled:
            from millrace.wire.tls import use_tls

            use_tls(tree.tls)
    setup_logging(tree.telemetry, service)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it reports every request
    return tree


def _with_cache(tree: Config) -> Config:
    """Sets the folder of profiles to the user's cache folder, unless a setting names a folder."""
    root = os.environ.get("XDG_CACHE_HOME")
    if tree.engine.profile_cache or not root:
        return tree
    folder = str(Path(root, "millrace", "profiles"))
    return replace(tree, engine=replace(tree.engine, profile_cache=folder))


def _environment() -> list[str]:
    """Returns the settings of MILLRACE_SECTION__FIELD variables, such as MILLRACE_STORE__URL."""
    return [
        f"{section.lower()}.{key.lower()}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith("MILLRACE_") and "__" in name
        for section, key in [name.removeprefix("MILLRACE_").split("__", 1)]
    ]


def usable_devices(tree: Config, option: str) -> list[str]:
    """Returns the GPUs for a local stack's instances; `option` is the value of --devices."""
    from millrace.local.devices import device_names
    from millrace.transfer.transport.nixl.library import torch_cuda

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with plain_errors():
        return device_names(option, visible, device=tree.engine.device, torch_cuda=torch_cuda())


def open_standard_files() -> None:
    """Opens /dev/null in place of each standard file that the parent closed (`>&-`, some daemons).

    The next file that this process opened would take its number, and get what is printed.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # gets `number`, the lowest that is free
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode, closefd=False))


def write_any_text() -> None:
    """Prints `?` for a character that the encoding of the output lacks, where Python would fail:
    answers and models' names may have any.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def leave_forks_alone() -> None:
    """Turns gRPC's fork handlers off. Call it before gRPC is imported.

    Child processes start another program at once: they never use gRPC's channels.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def reach_this_machine_directly() -> None:
    """Leaves this machine out of what goes by the user's HTTP proxy (`http_proxy` and the like).

    The clients of commands and their children read the variables; lower case counts first.
    """
    excepted = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if excepted.strip() != "*":
        names = [one for one in map(str.strip, excepted.split(",")) if one]
        names += [one for one in _THIS_MACHINE if one not in names]
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(names)


def run_async(work: Coroutine[None, None, None]) -> None:
    import uvloop

    from millrace.file_limit import raise_file_limit
    from millrace.thread_limit import check_threads

    raise_file_limit()
    with plain_errors(), contextlib.closing(work):
        check_threads()
        uvloop.run(work)


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Ends the process with one clear line for an error that a user can correct."""
    try:
        yield
    except MillraceError as error:
        print(f"{PREFIX}{error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


@contextlib.contextmanager
def full_output() -> Iterator[None]:
    """Ends the process with one clear line if the disk of its output is full."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has what it wanted
        _drop_output()
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _drop_output()
        print(f"{PREFIX}can't write the output: {reason_of(error)}", file=sys.stderr)
        raise SystemExit(1) from None


def _drop_output() -> None:
    """Lets what standard output still holds go: Python would try to write it at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tell(fd: int | None) -> Callable[[int], None]:
    """Returns a function that writes the port to `fd`, for the parent process."""

    def write(port: int) -> None:
        if fd is not None:
            with contextlib.suppress(BrokenPipeError):  # the parent is about to end this process
                os.write(fd, json.dumps({"port": port}).encode() + b"\n")
            os.close(fd)

    return write


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a command's result to the path of `--json`. Raises MillraceError for a bad path."""
    import orjson

    try:
        path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
    except OSError as error:
        raise MillraceError(f"--json {path}: {reason_of(error)}") from error
