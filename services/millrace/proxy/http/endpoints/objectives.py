"""Reads a request's objectives and class from its headers and its body."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.core.config import Config
from millrace.core.request import Slo
from millrace.core.weights import BATCH_CLASS
from millrace.proxy.errors import ApiError, bad_field, shown
from millrace.proxy.http.asgi import Scope, header
from millrace.proxy.request.models.objectives import LARGEST_MS

TTFT_HEADER = "x-millrace-ttft-slo-ms"
TBT_HEADER = "x-millrace-tbt-slo-ms"
E2E_HEADER = "x-millrace-e2e-slo-ms"
CLASS_HEADER = "x-millrace-class"
TRACE_HEADER = "x-millrace-trace"
FAIL_EARLY_HEADER = "x-millrace-fail-early"

#: The objective of the class `batch`, unless it is configured: later than that of any other class.
BATCH_TTFT_S = 86400.0


class Objectives:
    """Reads the objectives of requests. TTFT, TBT and E2E come from the header, or else from the
    body's field `millrace`, or else from the class, or else from `proxy`. A request without a class
    has the class `default`."""

    def __init__(self, config: Config) -> None:
        proxy = config.proxy
        fallback = Slo(
            ttft_s=proxy.default_ttft_slo_ms / 1e3 or None,
            tbt_s=proxy.default_tbt_slo_ms / 1e3 or None,
            e2e_s=proxy.default_e2e_slo_ms / 1e3 or None,
        )
        batch = Slo(ttft_s=BATCH_TTFT_S, class_name=BATCH_CLASS)
        self._classes: Mapping[str, Slo] = {
            fallback.class_name: fallback,
            batch.class_name: batch,
        } | {
            name: Slo(
                ttft_s=fallback.ttft_s if slo.ttft_s is None else slo.ttft_s,
                tbt_s=fallback.tbt_s if slo.tbt_s is None else slo.tbt_s,
                e2e_s=fallback.e2e_s if slo.e2e_s is None else slo.e2e_s,
                class_name=name,
            )
            for name, slo in config.slo_classes.items()
        }
        self._default = self._classes[fallback.class_name]

    @property
    def classes(self) -> list[str]:
        """The class names that a request may give."""
        return sorted(self._classes)

    def read(self, scope: Scope, allowed: Sequence[str], body: Mapping[str, Any]) -> Slo:
        """Returns the request's objectives. Raises ApiError naming the header or the field.

        `body` has the checked fields of the body's `millrace`; a header goes before its field.
        If `allowed` names classes, another class is refused (403), and the first is the class of a
        request that names none.
        """
        slo = self._classes[allowed[0]] if allowed else self._default
        name, field = header(scope, CLASS_HEADER.encode()), CLASS_HEADER
        if name is None and "class" in body:
            name, field = body["class"], "millrace.class"
        if name is not None:
            if name not in self._classes:
                known = ", ".join(self.classes)
                raise bad_field(field, f"must be one of {known}, got {shown(name)}.")
            if allowed and name not in allowed:
                raise ApiError(
                    403,
                    f"This key may not use the class {shown(name)}; it may use "
                    f"{', '.join(allowed)}.",
                    param=field,
                    code="class_not_allowed",
                )
            slo = self._classes[name]
        ttft_s = _seconds(scope, TTFT_HEADER, body.get("ttft_slo_ms"))
        tbt_s = _seconds(scope, TBT_HEADER, body.get("tbt_slo_ms"))
        e2e_s = _seconds(scope, E2E_HEADER, body.get("e2e_slo_ms"))
        if ttft_s is None and tbt_s is None and e2e_s is None:
            return slo
        return Slo(
            ttft_s=slo.ttft_s if ttft_s is None else ttft_s,
            tbt_s=slo.tbt_s if tbt_s is None else tbt_s,
            e2e_s=slo.e2e_s if e2e_s is None else e2e_s,
            class_name=slo.class_name,
        )


def _seconds(scope: Scope, name: str, in_body_ms: float | None) -> float | None:
    text = header(scope, name.encode())
    if text is None:
        return None if in_body_ms is None else in_body_ms / 1e3
    try:
        value = math.nan if "_" in text else float(text)  # Python would take 1_000
    except ValueError:
        value = math.nan
    if not 0 < value <= LARGEST_MS:
        raise bad_field(
            name, f"must be a number of milliseconds above 0, at most 1e9; got {shown(text)}."
        )
    return value / 1e3


def wants_trace(scope: Scope) -> bool:
    """Whether the client asks for a trace. Raises ApiError unless the header is absent, 0 or 1."""
    return _is_set(scope, TRACE_HEADER)


def wants_early_failure(scope: Scope, body: Mapping[str, Any]) -> bool:
    """Whether the client wants an error instead of a first token after its objective.

    `body` as in `Objectives.read`. Raises ApiError as `wants_trace`.
    """
    return _is_set(scope, FAIL_EARLY_HEADER, absent=body.get("fail_early", False))


def _is_set(scope: Scope, name: str, *, absent: bool = False) -> bool:
    text = header(scope, name.encode())
    if text not in (None, "0", "1"):
        raise bad_field(name, "must be 0 or 1.")
    return absent if text is None else text == "1"
