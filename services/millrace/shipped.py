"""What ships in the package for a first try."""

from __future__ import annotations

from pathlib import Path

SHIPPED_MODEL = Path(__file__).parent / "models" / "millrace-tiny"
