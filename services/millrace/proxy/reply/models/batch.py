"""The answers of /v1/files and /v1/batches, as the OpenAPI document describes them."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict


class File(TypedDict):
    """A file of /v1/files."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class DeletedFile(TypedDict):
    """The answer to the deletion of a file."""

    id: str
    object: Literal["file"]
    deleted: bool


class FileList(TypedDict):
    """A page of files."""

    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchCounts(TypedDict):
    """The requests of a batch, and those whose result is recorded."""

    total: int
    completed: int
    failed: int


class Batch(TypedDict):
    """A batch of /v1/batches. The time of each state is null until the batch enters it."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: dict[str, Any] | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: dict[str, Any]
    metadata: dict[str, str] | None


class BatchList(TypedDict):
    """A page of batches."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


#: Every answer that the document names.
BATCH_ANSWERS: tuple[Any, ...] = (Batch, BatchList, DeletedFile, File, FileList)
