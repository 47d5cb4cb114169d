"""The report of `millrace bench gpu` as a schema; docs/benchmarks/gpu keeps reports."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Status = Literal["passed", "failed", "skipped"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Finding(_Strict):
    """One checked claim: what was compared, and by how much it missed."""

    name: str
    passed: bool
    detail: str = ""


class Figure(_Strict):
    """One measured value. `expected`: the roofline's at this device's measured peaks, times the
    share that is asked for; None where no model predicts it. `share`: of the device's peak."""

    name: str
    value: float
    unit: str
    expected: float | None = None
    share: float | None = None


class PartReport(_Strict):
    """What one part found. `reason`: why it failed as a whole, or was skipped."""

    name: str
    status: Status
    seconds: float
    limit_s: float
    reason: str = ""
    findings: list[Finding] = []
    figures: list[Figure] = []


class Versions(_Strict):
    """Versions of what computed. Empty: not installed."""

    millrace: str
    python: str
    torch: str
    cuda: str
    triton: str
    flashinfer: str
    nixl: str


class Report(_Strict):
    """One run. `device`: the maker's name; `date`: UTC, ISO 8601."""

    benchmark: Literal["gpu"] = "gpu"
    device: str
    device_type: Literal["cuda", "cpu"]
    capability: str
    memory_bytes: int
    date: str
    versions: Versions
    parts: list[PartReport]

    @property
    def passed(self) -> bool:
        """Returns whether no part failed."""
        return all(part.status != "failed" for part in self.parts)
