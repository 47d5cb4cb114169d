"""Reads an upload (multipart/form-data) as it arrives: small fields, and one file in pieces."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from millrace.proxy.errors import ApiError, bad_field
from millrace.proxy.http.asgi import Receive, Scope, header, next_part

#: Bytes beside the file's: boundaries, headers and the other fields.
_FORM_BYTES = 64 << 10
_FIELD_BYTES = 1024
_MOST_FIELDS = 16
#: The file's bytes go on in pieces of at least this size.
_PIECE_BYTES = 1 << 20

FILE_FIELD = "file"


class Upload:
    """The fields of a form, and its file's name and size; complete when `receive` returns."""

    def __init__(self, boundary: bytes, max_bytes: int) -> None:
        """`max_bytes` bounds the file."""
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size_bytes = 0
        self._max_bytes = max_bytes
        self._held = bytearray()  # of the file, not yet taken
        self._headers: dict[bytes, bytes] = {}
        self._name = b""
        self._value = b""
        self._field = ""
        self._text = bytearray()
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._opened,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_end": self._finish,
            },
        )

    async def receive(self, receive: Receive, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Reads the whole body and hands the file's bytes to `write`.

        Raises ApiError: 413 as soon as the file is too large, 400 for a malformed form, 408 when
        the client sends nothing for long. Raises Disconnected when the client leaves.
        """
        more, read = True, 0
        while more:
            message = await next_part(receive)
            read += len(message.get("body", b""))
            self._feed(message.get("body", b""))
            if read - self.size_bytes > _FORM_BYTES + self.size_bytes // 16:
                raise _malformed("its headers and fields are too large")
            more = bool(message.get("more_body"))
            if len(self._held) >= _PIECE_BYTES or not more:
                piece, self._held = bytes(self._held), bytearray()
                await write(piece)
        if not self._ended:
            raise _malformed("it ends before its last boundary")
        if self.filename is None:
            raise ApiError(
                400,
                "Missing required parameter: 'file'.",
                param="file",
                code="missing_required_parameter",
            )

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(str(error)[:200]) from error

    def _begin(self) -> None:
        self._headers.clear()
        self._text.clear()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _opened(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._field = options.get(b"name", b"").decode("utf-8", "replace")
        if self._field in self.fields or (self._field == FILE_FIELD and self.filename is not None):
            raise bad_field(self._field[:80], "is there twice.")
        if len(self.fields) == _MOST_FIELDS:
            raise _malformed("it has too many fields")
        if self._field == FILE_FIELD:
            name = options.get(b"filename", b"upload").decode("utf-8", "replace")
            self.filename = name.replace("\\", "/").rpartition("/")[2][:255] or "upload"

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field == FILE_FIELD:
            self.size_bytes += end - start
            if self.size_bytes > self._max_bytes:
                raise file_too_large(self._max_bytes)
            self._held += data[start:end]
            return
        self._text += data[start:end]
        if len(self._text) > _FIELD_BYTES:
            raise bad_field(self._field[:80], f"is longer than {_FIELD_BYTES} bytes.")

    def _end(self) -> None:
        if self._field != FILE_FIELD:
            self.fields[self._field] = self._text.decode("utf-8", "replace")

    def _finish(self) -> None:
        self._ended = True


def open_upload(scope: Scope, max_bytes: int) -> Upload:
    """Returns an upload that is ready to be received. Raises ApiError (415, 413)."""
    kind, options = parse_options_header(header(scope, b"content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= 256:
        raise ApiError(
            415,
            "Content-Type must be multipart/form-data with a boundary.",
            param="Content-Type",
            code="unsupported_media_type",
        )
    declared = header(scope, b"content-length") or ""
    if declared.isdigit() and int(declared) > max_bytes + _FORM_BYTES:
        raise file_too_large(max_bytes)
    return Upload(boundary, max_bytes)


def file_too_large(max_bytes: int) -> ApiError:
    """Returns the error for a file above files.max_bytes."""
    message = f"The file is larger than {max_bytes} bytes."
    return ApiError(413, message, param="file", code="file_too_large")


def _malformed(why: str) -> ApiError:
    return ApiError(400, f"The form can't be read: {why}.", code="invalid_form")
