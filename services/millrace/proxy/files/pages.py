"""Pages of OpenAI's lists: objects by the time of their creation, after an object's id."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from millrace.proxy.errors import bad_field, shown
from millrace.state.records import Record, RecordStore

T = TypeVar("T")

#: Records that are read together.
_MOST_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWanted:
    """What a client asks of a list."""

    limit: int
    after: str | None = None
    newest_first: bool = True


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """The objects of a page, and whether more follow."""

    rows: list[T]
    has_more: bool


async def read_page(
    records: RecordStore,
    tenant: str,
    wanted: PageWanted,
    read: Callable[[Record], T | None],
) -> Page[T]:
    """Returns the next objects; `read` returns None for a record that the list leaves out.

    Raises ApiError naming `after` if the tenant has no such object, and StoreError.
    """
    rows: list[T] = []
    after = wanted.after
    while True:
        count = min(_MOST_AT_ONCE, wanted.limit + 1 - len(rows))
        ids = await records.page(tenant, after=after, count=count, newest_first=wanted.newest_first)
        if ids is None:
            raise bad_field("after", f"there is no object {shown(after)}.")
        gone = []
        for record_id, record in zip(ids, await records.get_many(ids), strict=True):
            if record is None:
                gone.append(record_id)
            elif (row := read(record)) is not None:
                rows.append(row)
        if len(rows) > wanted.limit:
            return Page(rows[: wanted.limit], has_more=True)
        if len(ids) < count:
            await _forget(records, gone, tenant)
            return Page(rows, has_more=False)
        after = ids[-1]
        await _forget(records, [name for name in gone if name != after], tenant)


async def _forget(records: RecordStore, gone: list[str], tenant: str) -> None:
    """Takes expired records off the list."""
    for record_id in gone:
        await records.delete(record_id, tenant)
