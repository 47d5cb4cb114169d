"""Gives the errors of a chat's body the names that the fields have in another API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from millrace.proxy.errors import ApiError

#: The other APIs have no object `function` or `custom` around a tool's fields.
_TOOL = re.compile(r"(?<![^'])((?:tool_choice\.)?tools\[\d+\])\.(?:function|custom)\b")


class FieldNames:
    """The fields of a chat's body that another API's clients call by other names."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """`names`: from a chat's field to the other API's; longer names first."""
        self._names = names
        # Errors name fields in quotes; what the client wrote beside them stays as it is.
        self._chat_name = re.compile("(?<![^'])(" + "|".join(map(re.escape, names)) + r")\b")

    @contextmanager
    def used(self) -> Iterator[None]:
        """Raises an error of a chat again, with the other API's names."""
        try:
            yield
        except ApiError as error:
            if error.param is None:
                raise
            raise ApiError(
                error.status,
                self._renamed(error.message),
                param=self._renamed(error.param),
                code=error.code,
                retry_after_s=error.retry_after_s,
                kind=error.kind,
                headers=error.more_headers,
            ) from None

    def _renamed(self, text: str) -> str:
        named = self._chat_name.sub(lambda found: self._names[found.group()], text)
        return _TOOL.sub(r"\1", named)
