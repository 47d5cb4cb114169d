"""Generates services/millrace/wire/pb from proto/*.proto.

`--check` changes nothing and fails when the committed stubs are stale.
"""

from __future__ import annotations

import argparse
import filecmp
import re
import shutil
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

PROTO_DIR = Path(__file__).resolve().parent
OUTPUT_DIR = PROTO_DIR.parent / "services" / "millrace" / "wire" / "pb"
HEADER = '"""Generated from proto/ by `make proto`. Do not edit."""\n'
PLUGIN = "protoc-gen-mypy_grpc"  # of mypy-protobuf: types for the service stubs

#: protoc imports siblings as top-level modules; ours live in a package.
SIBLING_IMPORT = re.compile(r"^import (\w+_pb2) as (\w+)$", flags=re.MULTILINE)


def plugin_path() -> str:
    """Where the plugin is: beside this interpreter, else on PATH. Exits when it is nowhere."""
    beside = Path(sys.executable).with_name(PLUGIN)
    found = str(beside) if beside.exists() else shutil.which(PLUGIN)
    if found is None:
        sys.exit(f"{PLUGIN} is missing: install the development dependencies (mypy-protobuf)")
    return found


def generate(output: Path) -> None:
    """Writes message, type and service stubs for every .proto file into `output`.

    Service stubs are typed for grpc.aio alone; Millrace has no other kind.
    """
    sources = sorted(PROTO_DIR.glob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTO_DIR}",
            f"--python_out={output}",
            f"--pyi_out={output}",
            f"--grpc_python_out={output}",
            f"--plugin={PLUGIN}={plugin_path()}",
            f"--mypy_grpc_out=only_async,quiet:{output}",
            *map(str, sources),
        ]
    )
    if status != 0:
        sys.exit(status)
    for source in sources:
        if not re.search(r"^service ", source.read_text(), flags=re.MULTILINE):
            for suffix in (".py", ".pyi"):
                (output / f"{source.stem}_pb2_grpc{suffix}").unlink()
    for path in (*output.glob("*_pb2*.py"), *output.glob("*_pb2*.pyi")):
        path.write_text(
            SIBLING_IMPORT.sub(r"from millrace.wire.pb import \1 as \2", path.read_text())
        )
    (output / "__init__.py").write_text(HEADER)


def stale(fresh: Path) -> list[str]:
    """Names of stubs that differ between `fresh` and the committed ones, or are in one alone."""
    names = {
        path.name
        for folder in (fresh, OUTPUT_DIR)
        for path in folder.iterdir()
        if path.suffix in (".py", ".pyi")
    }
    return sorted(
        name
        for name in names
        if not ((fresh / name).exists() and (OUTPUT_DIR / name).exists())
        or not filecmp.cmp(fresh / name, OUTPUT_DIR / name, shallow=False)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 when stale")
    if parser.parse_args().check:
        with tempfile.TemporaryDirectory() as temporary:
            generate(Path(temporary))
            if names := stale(Path(temporary)):
                sys.exit(f"stubs are stale, run `make proto`: {', '.join(names)}")
        return
    OUTPUT_DIR.mkdir(parents=True, exist_ok=True)
    for path in OUTPUT_DIR.glob("*_pb2*"):
        path.unlink()
    generate(OUTPUT_DIR)


if __name__ == "__main__":
    main()
