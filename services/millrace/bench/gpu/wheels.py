"""Fills a folder with the wheels that `make gpu-check` needs beside torch, Triton and NumPy.

python -m millrace.bench.gpu.wheels FOLDER [PYTHON_VERSION]

The packages and versions are those of this environment: what Millrace and pytest need, with all
that these need, and without what a machine with a GPU has already. NIXL's wheel is written again
without what Millrace does not load, most of its size: expert-parallel kernels, tools, and plugins
other than UCX with the libraries that they alone use.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MOST_BYTES: Final = 60 << 20

_EXTRAS: Final = ("", "engine", "local")
"""Dependencies of Millrace itself and of these extras are needed."""
_TOOLS: Final = (
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "hypothesis",
    "scikit-build-core",
    "nanobind",
)
"""What runs the tests of kernels and builds the C++ modules."""
_THERE: Final = frozenset(
    {"torch", "numpy", "triton", "matplotlib", "setuptools", "huggingface-hub", "textual"}
)
"""On the machine already, or not needed: nothing is fetched from a hub, or drawn. The machine's
transformers may refuse another version of `huggingface-hub`."""
_DROPPED: Final = (
    r"nixl_ep_cu13/|nixl_cu13\.scripts/|.*/libucx_perftest|.*/libplugin_(?!UCX\.)[A-Z_]+"
    r"|.*/libtelemetry_|.*/libtrace_|nixl_cu13\.libs/lib(aws|azure|s2n|curl|gusli|xml2|aio)"
)
#: Of glibc 2.31 or older, which Debian 11 and Ubuntu 20.04 have.
_PLATFORMS: Final = (
    *("manylinux_2_31", "manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014"),
)


def needed() -> dict[str, str]:
    """Returns the version of every package that is needed, by its name."""
    own = [Requirement(line) for line in metadata.requires("millrace") or ()]
    waiting = [one.name for one in own if _is_of(one, _EXTRAS)] + list(_TOOLS)
    found: dict[str, str] = {}
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found or name in _THERE:
            continue
        found[name] = metadata.version(name)
        waiting += _required_by(name)
    return found


def _required_by(name: str) -> Iterable[str]:
    for line in metadata.requires(name) or ():
        one = Requirement(line)
        if _is_of(one, ("",)):
            yield one.name


def _is_of(one: Requirement, extras: Iterable[str]) -> bool:
    return one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras)


def fetch(folder: Path, python: str) -> None:
    """Downloads the wheels for x86-64 Linux. Raises CalledProcessError where pip finds none."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += [f"--platform={platform}_x86_64" for platform in _PLATFORMS]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    command += ["--disable-pip-version-check", "--quiet"]
    subprocess.run([*command, *(f"{k}=={v}" for k, v in sorted(needed().items()))], check=True)
    for wheel in folder.glob("nixl_cu13-*.whl"):
        drop(wheel, _DROPPED)


def drop(wheel: Path, pattern: str) -> None:
    """Writes a wheel again without the files that match, and without their records."""
    smaller = wheel.with_suffix(".new")
    with (
        zipfile.ZipFile(wheel) as old,
        zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new,
    ):
        for entry in old.infolist():
            if re.match(pattern, entry.filename):
                continue
            content = old.read(entry)
            if re.fullmatch(r"[^/]+\.dist-info/RECORD", entry.filename):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(x for x in lines if not re.match(pattern, x)).encode()
            new.writestr(entry, content)
    smaller.replace(wheel)


def main(arguments: list[str]) -> int:
    """Fetches the wheels; 1 if they are larger than `MOST_BYTES`."""
    folder = Path(arguments[0])
    fetch(folder, arguments[1] if arguments[1:] else "{}.{}".format(*sys.version_info[:2]))
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{folder}: {len(list(folder.glob('*.whl')))} wheels, {size / 2**20:.1f} MiB")
    return int(size > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
