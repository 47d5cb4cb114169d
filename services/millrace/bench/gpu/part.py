"""One part of `millrace bench gpu`, in a process of its own.

python -m millrace.bench.gpu.part PART DEVICE SOURCE OUT

writes a `Found` as JSON to the file OUT. It ends with another code if the part raised.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import BaseModel

from millrace.bench.gpu.document import Figure, Finding


class Found(BaseModel):
    """What a part hands back. `skipped`: why nothing was checked, or ""."""

    findings: list[Finding] = []
    figures: list[Figure] = []
    skipped: str = ""


@dataclass(slots=True)
class Context:
    """Where a part runs, and where it puts its results."""

    device: torch.device
    source: Path
    found: Found = field(default_factory=Found)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def claim(self, name: str, passed: bool, detail: str = "") -> None:
        """Notes whether a claim holds."""
        self.found.findings.append(Finding(name=name, passed=passed, detail=detail))

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        expected: float | None = None,
        share: float | None = None,
    ) -> None:
        """Notes a measured value; fields as of `Figure`."""
        self.found.figures.append(
            Figure(name=name, value=value, unit=unit, expected=expected, share=share)
        )


def main(arguments: list[str]) -> None:
    """Runs the named part. The modules are those of `parts`; each has `check(context)`."""
    part, device, source, out = arguments
    context = Context(torch.device(device), Path(source))
    module = importlib.import_module(f"millrace.bench.gpu.parts.{part.replace('-', '_')}")
    try:
        module.check(context)
    finally:  # what was found before an error is reported too
        Path(out).write_text(context.found.model_dump_json())


if __name__ == "__main__":
    main(sys.argv[1:])
