"""The objectives of a request in its body: the fields of `millrace`, as the headers have them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, with_config
from typing_extensions import TypedDict

from millrace.proxy.request.models.fields import STRICT, Within

#: The largest objective, in milliseconds.
LARGEST_MS = 1e9

#: As vLLM's field.
Priority = Annotated[
    int | None,
    Within(-(2**31), 2**31 - 1),
    Field(description="Order among the tenant's requests of the class: the smaller goes first."),
]
_Ms = Annotated[float | None, Within(0, LARGEST_MS, above=True)]
_FIELDS: dict[str, Any] = {
    "class": Annotated[str | None, Field(description="x-millrace-class", max_length=63)],
    "ttft_slo_ms": Annotated[_Ms, Field(description="x-millrace-ttft-slo-ms")],
    "tbt_slo_ms": Annotated[_Ms, Field(description="x-millrace-tbt-slo-ms")],
    "e2e_slo_ms": Annotated[_Ms, Field(description="x-millrace-e2e-slo-ms")],
    "fail_early": Annotated[bool | None, Field(description="x-millrace-fail-early")],
}
_make: Any = TypedDict  # a field is named as a keyword of Python
#: The body's field `millrace`. A header goes before its field.
ObjectiveFields = with_config(STRICT)(_make("ObjectiveFields", _FIELDS, total=False))
