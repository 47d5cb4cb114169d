"""Checks the input of a batch, line by line, before any request of it runs."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.proxy.batches.lines import Line, LineError, read_request
from millrace.proxy.errors import ApiError, shown

#: After this many errors no more are looked for.
MOST_ERRORS = 100
#: Lines after which other work of the process gets a turn.
_TURN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The requests of an input, or the errors of its lines.

    `model` is None if the requests name several models.
    """

    total: int
    model: str | None
    errors: Sequence[dict[str, Any]]


class _Check:
    """What all lines have in common: models that are served, and a `custom_id` each."""

    def __init__(
        self, endpoint: str, most_lines: int, check_model: Callable[[str], object]
    ) -> None:
        self._endpoint = endpoint
        self._most_lines = most_lines
        self._check_model = check_model
        self._ids: set[bytes] = set()  # digests: 16 bytes each
        self._models: set[str] = set()
        self.total = 0

    @property
    def model(self) -> str | None:
        return next(iter(self._models)) if len(self._models) == 1 else None

    def take(self, text: bytes) -> None:
        """Raises LineError."""
        self.total += 1
        if self.total > self._most_lines:
            message = f"The batch has more than {self._most_lines} requests."
            raise LineError("too_many_tasks", message)
        request = read_request(text, self._endpoint)
        digest = hashlib.sha256(request.custom_id.encode("utf-8", "surrogatepass")).digest()[:16]
        if digest in self._ids:
            message = f"The custom_id {shown(request.custom_id)} is used in an earlier line."
            raise LineError("duplicate_custom_id", message, "custom_id")
        self._ids.add(digest)
        if request.model not in self._models:
            try:
                self._check_model(request.model)
            except ApiError as error:
                raise LineError("model_not_found", error.message, "body.model") from None
            self._models.add(request.model)


async def check_input(
    lines: AsyncIterator[Line],
    endpoint: str,
    *,
    most_lines: int,
    check_model: Callable[[str], object],
    stop: Callable[[], bool],
) -> Checked | None:
    """Returns what the lines hold, or None when `stop` said so.

    `check_model` raises ApiError for an unknown model.
    """
    check = _Check(endpoint, most_lines, check_model)
    errors: list[dict[str, Any]] = []
    number = 0
    try:
        async for line in lines:
            number += 1
            if number % _TURN == 0:
                await asyncio.sleep(0)
                if stop():
                    return None
            if not line.text:
                continue
            try:
                check.take(line.text)
            except LineError as error:
                errors.append(error.document(number))
                if len(errors) == MOST_ERRORS or error.code == "too_many_tasks":
                    break
    except LineError as error:  # the line is too long to be read
        errors.append(error.document(number + 1))
    if not check.total and not errors:
        errors.append(LineError("empty_file", "The input file has no requests.").document(None))
    return Checked(total=check.total, model=check.model, errors=errors)
