"""`make gpu-check`: runs `millrace bench gpu` from a source tree, without network.

python -P services/millrace/bench/gpu/bootstrap.py [--device cuda] [--wheels FOLDER] [--parts ...]

Needs a Python with torch, NumPy and Triton. The wheels, and Millrace itself, go to a folder of
their own, build/gpu-check/site; the Python's own packages stay as they are. Without a C++ compiler
and CMake, Millrace is installed without its C++ modules, and torch computes what runs on the CPU.
Imports the standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
FOLDER = ROOT / "build" / "gpu-check"
SITE = FOLDER / "site"
REPORTS = ROOT / "docs" / "benchmarks" / "gpu"


def main(arguments: list[str]) -> int:
    """Installs, runs, and keeps the report of a GPU. Returns 0 if no part failed."""
    parser = argparse.ArgumentParser(prog="gpu-check")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu: small sizes")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build" / "gpu-wheels")
    parser.add_argument("--parts", default="", help="as of `millrace bench gpu`")
    parser.add_argument("--limit-s", default="", help="as of `millrace bench gpu`")
    given = parser.parse_args(arguments)
    install(given.wheels)
    report = FOLDER / "report.json"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "millrace", "bench", "gpu", "--device", given.device]
    command += ["--source", str(ROOT), "--json", str(report)]
    command += ["--parts", given.parts] if given.parts else []
    command += ["--limit-s", given.limit_s] if given.limit_s else []
    subprocess.run(command, env=environment(), cwd=FOLDER, check=False)
    if not report.exists():
        return 1  # the command has said why
    document = json.loads(report.read_text())
    if document["device_type"] == "cuda":
        REPORTS.mkdir(parents=True, exist_ok=True)
        shutil.copy(report, REPORTS / name_of(document))
    return int(any(part["status"] == "failed" for part in document["parts"]))


def name_of(document: dict[str, str]) -> str:
    """Returns the name of a report's file: the device and the date."""
    device = re.sub(r"[^a-z0-9]+", "-", document["device"].lower()).strip("-")
    return f"{device}-{document['date']}.json"


def environment() -> dict[str, str]:
    """Returns the environment in which the folder's packages go before the Python's own."""
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(SITE), *([inherited] if inherited else [])])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def install(wheels: Path) -> None:
    """Installs the wheels and Millrace. Ends the process with a message where that fails."""
    found = sorted(wheels.glob("*.whl"))
    if not found:
        sys.exit(f"gpu-check: no wheels in {wheels}; `make gpu-wheels` on a machine with network")
    shutil.rmtree(SITE, ignore_errors=True)
    SITE.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-warn-conflicts"]
    pip += ["--disable-pip-version-check", "--quiet", "--target", str(SITE), "--upgrade"]
    pip += ["--root-user-action", "ignore", "--no-compile"]
    own = [str(ROOT), "--no-build-isolation", "-C", f"build-dir={FOLDER / 'cpp'}"]
    for what in (list(map(str, found)), own):
        if subprocess.run([*pip, *what], env=environment(), check=False).returncode:
            sys.exit("gpu-check: pip could not install, see above")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
