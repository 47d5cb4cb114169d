"""Generates services/millrace/wire/pb from proto/*.proto.

`--check` fails when the committed stubs are stale.
"""

from __future__ import annotations

import argparse
import filecmp
import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

PROTO_DIR = Path(__file__).resolve().parent
OUTPUT_DIR = PROTO_DIR.parent / "services" / "millrace" / "wire" / "pb"
HEADER = '"""Generated from proto/ by `make proto`. Do not edit."""\n'


def generate(output: Path) -> None:
    """Writes message, type and service stubs for every .proto file into `output`."""
    sources = sorted(str(p) for p in PROTO_DIR.glob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTO_DIR}",
            f"--python_out={output}",
            f"--pyi_out={output}",
            f"--grpc_python_out={output}",
            *sources,
        ]
    )
    if status != 0:
        sys.exit(status)
    for path in (*output.glob("*_pb2*.py"), *output.glob("*.pyi")):
        text = re.sub(
            r"^import (\w+_pb2) as (\w+)$",
            r"from millrace.wire.pb import \1 as \2",
            path.read_text(),
            flags=re.MULTILINE,
        )
        path.write_text(text)
    for path in output.glob("*_pb2_grpc.py"):
        if (
            "(object):" in path.read_text()
            and "class " not in path.read_text().split("(object):")[0]
        ):
            path.unlink()
    (output / "__init__.py").write_text(HEADER)


def stale(fresh: Path) -> list[str]:
    """Names of files that differ from the committed stubs, or stand on one side only."""
    names = {
        p.name for d in (fresh, OUTPUT_DIR) for p in d.iterdir() if p.suffix in (".py", ".pyi")
    }
    return sorted(
        n
        for n in names
        if not ((fresh / n).exists() and (OUTPUT_DIR / n).exists())
        or not filecmp.cmp(fresh / n, OUTPUT_DIR / n, shallow=False)
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
