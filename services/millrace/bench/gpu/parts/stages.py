"""Part *stages*: two pipeline stages with KV pools of their own against one, and KV between both.

Rows go between the stages through the host. With one device both stages are on it.
"""

from __future__ import annotations

from millrace.bench.gpu.part import Context
from millrace.bench.gpu.split_engine import check_members


def check(context: Context) -> None:
    """Compares logits, moves a prompt's KV each way, and swaps it out and in."""
    check_members(context, "stages", meet="through the host", apart="through the host")
