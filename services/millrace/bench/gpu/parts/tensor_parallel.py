"""Part *tensor-parallel*: two ranks with KV pools of their own against one, and KV between both.

With one device both ranks are on it. NCCL refuses that, so their collectives go through the host.
"""

from __future__ import annotations

from millrace.bench.gpu.part import Context
from millrace.bench.gpu.split_engine import check_members


def check(context: Context) -> None:
    """Compares logits, moves a prompt's KV each way, and swaps it out and in."""
    check_members(context, "ranks", meet="through the host", apart="by NCCL")
