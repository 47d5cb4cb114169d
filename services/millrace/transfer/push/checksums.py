"""crc32c of the parts of a transfer, over the bytes in a pool (`transfer.kv_checksum`).

Sender and receiver sum the same bytes in the same order, whatever their page sizes, page orders and
heads: plane, head, token. A head that several ranks of the receiver hold counts once for each.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from millrace.core.errors import ConfigError, TransferError
from millrace.core.kv.layout import KvLayout
from millrace.transfer.push.messages import WrittenRange
from millrace.transfer.transport.layout import Side, layer_runs, one_page
from millrace.transfer.transport.regions import HOST, Memory
from millrace.transfer.transport.runs import Runs
from millrace.transfer.transport.sums import crc_of

Parts = tuple[WrittenRange, ...]

#: The most token ranges of a side whose runs are kept; the layers of a chunk share one range.
_MAX_KEPT = 16


def require_readable(pool: Memory, layout: KvLayout) -> None:
    """Raises ConfigError for a pool whose bytes the host can't sum."""
    if where := unreadable(pool, layout):
        raise ConfigError(
            f"transfer.kv_checksum is 'on'; it must be 'off' when the KV pool {where}"
        )


def unreadable(pool: Memory, layout: KvLayout) -> str:
    """Returns why the host can't sum or copy a pool's bytes; empty when it can."""
    if pool.device != HOST:
        return "is in device memory"
    if pool.nbytes < layout.pool_bytes:
        return f"is in the memory of {len(layout.member_pools)} processes"
    return ""


class PartSums:
    """Sums parts of one end's pool; `peer` is the other end's layout. Belongs to one thread."""

    def __init__(self, pool: Memory, side: Side, peer: KvLayout, *, sends: bool) -> None:
        self._pool = pool
        self._side = side
        self._peer = peer
        copies = range(peer.copies if sends else side.layout.copies)
        ours = [copy % side.layout.copies for copy in copies]  # as `layer_runs` takes turns
        self._shifts = [copy * side.layout.part_bytes for copy in ours]
        self._runs: dict[tuple[int, int], Runs] = {}

    def of(self, part: WrittenRange) -> int:
        """Returns the crc32c of a part. Raises ValueError for tokens that are not of this side."""
        runs = self._runs_of(part.start_token, part.num_tokens)
        layer = self._side.layout.layer_offset(part.layer)
        value = 0
        for shift in self._shifts:
            value = crc_of(self._pool, runs.shifted(layer + shift, 0), value)
        return value

    def _runs_of(self, start_token: int, num_tokens: int) -> Runs:
        key = (start_token, num_tokens)
        if key not in self._runs:
            if len(self._runs) >= _MAX_KEPT:
                self._runs.clear()
            page = one_page(self._side.layout, self._peer, start_token, num_tokens)
            runs = layer_runs(self._side, page, start_token, num_tokens)
            order = np.argsort(runs.target)
            self._runs[key] = Runs(runs.source[order], runs.target[order], runs.length[order])
        return self._runs[key]


class SumThread:
    """One thread that sums, so that the event loop does not wait for it."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def wrong(self, sums: PartSums, parts: Parts) -> Future[WrittenRange | None]:
        """Finds the first part whose checksum is not that of its bytes."""
        return self._thread.submit(
            lambda: next((part for part in parts if sums.of(part) != part.checksum), None)
        )

    def summed(
        self, sums: PartSums, parts: Parts, post: Callable[[Parts], Future[None]]
    ) -> Future[None]:
        """Calls `post` with the parts and their checksums, on this thread. The future ends as the
        future of `post` does; it can be cancelled until `post` is called.
        """
        write: Future[None] = Future()
        self._thread.submit(_post_summed, sums, parts, post, write)
        return write

    def close(self) -> None:
        self._thread.shutdown(wait=True)


def _post_summed(
    sums: PartSums, parts: Parts, post: Callable[[Parts], Future[None]], write: Future[None]
) -> None:
    try:
        summed = tuple(part._replace(checksum=sums.of(part)) for part in parts)
        if write.set_running_or_notify_cancel():
            post(summed).add_done_callback(partial(_end_as, write))
    except Exception as error:  # the session fails with it
        write.set_exception(error)


def _end_as(write: Future[None], posted: Future[None]) -> None:
    if posted.cancelled():
        write.set_exception(TransferError("the write was cancelled"))
    elif (error := posted.exception()) is not None:
        write.set_exception(error)
    else:
        write.set_result(None)
