"""Part *tensor-parallel*: two ranks with KV pools of their own against one, and KV between both.

With one device both ranks are on it. NCCL refuses that, so their collectives go through the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from millrace.bench.gpu.part import Context
from millrace.bench.gpu.shapes import FAMILIES
from millrace.bench.gpu.small_engine import small_engine
from millrace.bench.gpu.split_engine import compare
from millrace.instance.transfer.transports import set_environment


@torch.inference_mode()
def check(context: Context) -> None:
    """Compares logits, moves a prompt's KV each way, and swaps it out and in."""
    set_environment("127.0.0.1")
    ranks, how = placement(context)
    family, device = FAMILIES["llama"], str(context.device)
    with (
        small_engine(family, device, "float32") as alone,
        small_engine(family, device, "float32", ranks=ranks) as split,
    ):
        compare(context, split, alone, "two ranks", how)


def placement(context: Context) -> tuple[Sequence[str], str]:
    """Returns the devices of two ranks, and where they are and how they meet, in words."""
    if not context.is_cuda:
        return ("cpu", "cpu"), "on the host"
    if torch.cuda.device_count() > 1:
        return ("cuda:0", "cuda:1"), "on two devices, by NCCL"
    return ("cuda:0", "cuda:0"), "on the one device there is, through the host"
