"""/v1/files: takes, lists, shows, sends and deletes files."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from millrace.proxy.errors import ApiError, bad_field, shown
from millrace.proxy.files.objects import Part
from millrace.proxy.files.pages import Page, PageWanted
from millrace.proxy.files.store import Files
from millrace.proxy.http.asgi import Receive, Scope, Send, send_document
from millrace.proxy.http.endpoints.uploads import Upload, open_upload
from millrace.proxy.http.query import list_of, newest_first, number, query_of
from millrace.proxy.http.tenants import Tenants

log = logging.getLogger(__name__)

FILES_PATH = "/v1/files"
FILE_PATH = FILES_PATH + "/{file_id}"

#: Purposes for which something here reads a file.
PURPOSES = ("batch", "user_data")
MOST_FILES = 10_000
#: The value of files.url of a server that takes no files, and so no batches.
NO_FILES = "none"
#: The longest time of an upload.
UPLOAD_S = 86400.0
LEAST_LIFETIME_S, MOST_LIFETIME_S = 3600, 30 * 86400


class FileEndpoints:
    """Answers the requests about files."""

    def __init__(self, files: Files, tenants: Tenants) -> None:
        self._files = files
        self._tenants = tenants

    async def create_or_list(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Answers POST and GET of all files."""
        if scope["method"] != "POST":
            return await self._list(scope, send)
        tenant, config = self._tenants.of(scope), self._files.config
        if config.url == NO_FILES:
            raise ApiError(404, "This server keeps no files: files.url is none.", code="no_files")
        upload = open_upload(scope, config.max_bytes)
        async with self._files.blob(UPLOAD_S) as (blob, writer):
            await upload.receive(receive, writer.write)
            purpose, lifetime_s = _purpose(upload), lifetime_of(upload.fields, config.ttl_s)
        file = await self._files.add(
            [Part(blob=blob, size_bytes=upload.size_bytes)],
            tenant=tenant,
            filename=upload.filename or "",
            purpose=purpose,
            lifetime_s=lifetime_s,
        )
        return await send_document(send, file.document())

    async def retrieve_or_delete(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Answers GET and DELETE of one file."""
        file_id, tenant = scope["path_params"]["file_id"], self._tenants.of(scope)
        if scope["method"] != "DELETE":
            return await send_document(send, (await self._files.find(file_id, tenant)).document())
        await self._files.delete(file_id, tenant)
        deleted = {"id": file_id, "object": "file", "deleted": True}
        return await send_document(send, deleted)

    async def content(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Answers GET of a file's bytes."""
        file = await self._files.find(scope["path_params"]["file_id"], self._tenants.of(scope))
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", b"%d" % file.size_bytes),
        ]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        started = False
        try:
            async with contextlib.aclosing(self._files.content(file.parts)) as pieces:
                async for piece in pieces:
                    if not started:
                        await send(start)
                        started = True
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except ApiError as error:
            if not started:
                raise
            # The server closes the connection: the client sees fewer bytes than were announced.
            log.warning("file %s: %s", file.id, error)
            return 500
        if not started:
            await send(start)
        await send({"type": "http.response.body", "body": b""})
        return 200

    async def _list(self, scope: Scope, send: Send) -> int:
        query = query_of(scope)
        wanted = PageWanted(
            limit=number(query, "limit", MOST_FILES, 1, MOST_FILES),
            after=query.get("after"),
            newest_first=newest_first(query),
        )
        page = await self._files.page(self._tenants.of(scope), wanted, query.get("purpose"))
        return await send_document(send, listed(page))


def listed(page: Page[Any]) -> dict[str, Any]:
    """Returns OpenAI's list of a page of objects with documents."""
    return list_of([row.document() for row in page.rows], has_more=page.has_more)


def lifetime_of(fields: dict[str, str], default_s: float) -> float:
    """Returns the seconds of `expires_after`, or the default. Raises ApiError naming a field."""
    anchor, seconds = "expires_after[anchor]", "expires_after[seconds]"
    if anchor not in fields and seconds not in fields:
        return default_s
    if fields.get(anchor, "created_at") != "created_at":
        raise bad_field(anchor, f"must be 'created_at', got {shown(fields[anchor])}.")
    return float(number(fields, seconds, MOST_LIFETIME_S, LEAST_LIFETIME_S, MOST_LIFETIME_S))


def _purpose(upload: Upload) -> str:
    if "purpose" not in upload.fields:
        missing = "Missing required parameter: 'purpose'."
        raise ApiError(400, missing, param="purpose", code="missing_required_parameter")
    purpose = upload.fields["purpose"]
    if purpose not in PURPOSES:
        raise bad_field("purpose", f"must be one of {', '.join(PURPOSES)}, got {shown(purpose)}.")
    return purpose
