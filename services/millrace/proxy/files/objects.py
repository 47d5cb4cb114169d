"""A file of /v1/files: its record, and OpenAI's object of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A blob with the next bytes of a file."""

    blob: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A complete file. Its bytes are those of its parts, one after the other. Times are Unix, s."""

    id: str
    tenant: str
    filename: str
    purpose: str
    created_at: int
    expires_at: int
    parts: Sequence[Part]

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def blobs(self) -> list[str]:
        return [part.blob for part in self.parts]

    def document(self) -> Json:
        """Returns OpenAI's object `file`."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }

    def encoded(self) -> bytes:
        """Returns the record's body."""
        return orjson.dumps(asdict(self))


def decode_file(body: bytes) -> File:
    """Returns the file of a record's body."""
    fields: Json = orjson.loads(body)
    return File(**fields | {"parts": [Part(**part) for part in fields["parts"]]})
