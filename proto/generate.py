"""Generates services/millrace/wire/pb from proto/millrace/v1/*.proto.

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
PACKAGE = "millrace.v1"
PACKAGE_DIR = PROTO_DIR.joinpath(*PACKAGE.split("."))
OUTPUT_DIR = PROTO_DIR.parent / "services" / "millrace" / "wire" / "pb"
HEADER = '"""Generated from proto/ by `make proto`. Do not edit."""\n'
PLUGIN = "protoc-gen-mypy_grpc"  # of mypy-protobuf: types for the service stubs

#: protoc names Python packages after the proto package. Millrace's stubs lie in one of its own.
IMPORTS = (f"from {PACKAGE} import ", "from millrace.wire.pb import ")


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
    sources = sorted(PACKAGE_DIR.glob("*.proto"))
    with tempfile.TemporaryDirectory() as root:
        status = protoc.main(
            [
                "protoc",
                f"-I{PROTO_DIR}",
                f"--python_out={root}",
                f"--pyi_out={root}",
                f"--grpc_python_out={root}",
                f"--plugin={PLUGIN}={plugin_path()}",
                f"--mypy_grpc_out=only_async,quiet:{root}",
                *map(str, sources),
            ]
        )
        if status != 0:
            sys.exit(status)
        services = {path.stem for path in sources if has_service(path)}
        for path in Path(root, *PACKAGE.split(".")).iterdir():
            stem, _, kind = path.stem.partition("_pb2")
            if not kind or stem in services:
                (output / path.name).write_text(path.read_text().replace(*IMPORTS))
    (output / "__init__.py").write_text(HEADER)


def has_service(source: Path) -> bool:
    return re.search(r"^service ", source.read_text(), flags=re.MULTILINE) is not None


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
