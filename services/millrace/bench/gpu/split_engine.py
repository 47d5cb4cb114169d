"""An engine of two members with KV pools of their own against one of one: the checks of the parts
*tensor-parallel* and *stages*.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from millrace.bench.gpu.part import Context
from millrace.bench.gpu.shapes import FAMILIES
from millrace.bench.gpu.small_engine import Prompt, logits_of, new_prompt, small_engine, task_of
from millrace.engine.assembly import Engine
from millrace.engine.kv.host_swap import KvSwap
from millrace.engine.kv.step_tables import page_table_of
from millrace.instance.transfer.transports import kv_transport, set_environment
from millrace.transfer.transport.base import Transport
from millrace.transfer.transport.layout import Side, at_layer, layer_runs
from millrace.transfer.transport.regions import Memory

_TOLERANCE: Final = 1e-3
"""Largest difference of two logits, in standard deviations of all logits."""
_TOKENS: Final = 100
_ANSWER_S: Final = 20.0


@torch.inference_mode()
def check_members(
    context: Context, kind: Literal["ranks", "stages"], meet: str, apart: str
) -> None:
    """Compares two ranks or stages with one engine: logits, a prompt's KV moved each way, and KV
    that is swapped out and in.

    With one device both are on it. `meet`, `apart`: how they reach each other then, and on two.
    """
    set_environment("127.0.0.1")
    device, members = str(context.device), f"two {kind}"
    if not context.is_cuda:
        devices, how = ("cpu", "cpu"), "on the host"
    elif torch.cuda.device_count() > 1:
        devices, how = ("cuda:0", "cuda:1"), f"on two devices, {apart}"
    else:
        devices, how = ("cuda:0", "cuda:0"), f"on the one device there is, {meet}"
    family = FAMILIES["llama"]
    with (
        small_engine(family, device, "float32") as alone,
        small_engine(
            family,
            device,
            "float32",
            ranks=devices if kind == "ranks" else (),
            stages=devices if kind == "stages" else (),
        ) as split,
        ExitStack() as stack,
    ):
        context.claim(f"{members}: {how}", *_close(logits_of(split), logits_of(alone)))
        ends = {
            name: End.open(stack, name, engine)
            for name, engine in ((members, split), ("one", alone))
        }
        for sender, receiver in (tuple(ends), tuple(ends)[::-1]):
            found, wanted = moved(ends[sender], ends[receiver])
            context.claim(f"KV of {sender} at {receiver}", *_close(found, wanted))
        found, wanted = swapped(split)
        same = bool(torch.equal(found, wanted))
        context.claim(f"KV of {members}, swapped out and in", same, "the same bits" * same)


@dataclass(frozen=True, slots=True)
class End:
    """An engine with its KV on a transport."""

    engine: Engine
    transport: Transport
    region: int

    @staticmethod
    def open(stack: ExitStack, name: str, engine: Engine) -> End:
        """Opens the agents of all ranks until the stack ends."""
        transport = kv_transport(name.replace(" ", "-"), engine).transport
        stack.callback(transport.close)
        return End(engine, transport, transport.register(Memory.of_tensor(engine.storage)))


def moved(sender: End, receiver: End) -> tuple[Tensor, Tensor]:
    """Moves a prompt's KV. Returns the next step's logits at the receiver, and at the sender."""
    prompts = [new_prompt(end.engine, _TOKENS, 7) for end in (sender, receiver)]
    _prefill(sender.engine, prompts[0])
    pages = [prompt.pages for prompt in prompts]
    layouts = sender.engine.layout, receiver.engine.layout
    sides = [Side.of(layout, own, _TOKENS) for layout, own in zip(layouts, pages, strict=True)]
    runs = layer_runs(sides[0], sides[1], 0, _TOKENS)
    peer = sender.transport.connect(receiver.transport.metadata()).result(_ANSWER_S)
    with receiver.transport.listening():
        for layer in layouts[0].layers:
            sender.transport.write(
                peer,
                at_layer(runs, *layouts, layer),
                b"",
                region=sender.region,
                peer_region=receiver.region,
            ).result(_ANSWER_S)
    return _step(receiver.engine, pages[1]), _step(sender.engine, pages[0])


def swapped(engine: Engine) -> tuple[Tensor, Tensor]:
    """Swaps a prompt's KV out and into other pages. Returns the next step's logits, and those of
    the KV where it was."""
    prompt = new_prompt(engine, _TOKENS, 11)
    _prefill(engine, prompt)
    wanted = _step(engine, prompt.pages)
    swap = KvSwap(engine.storage, 16 << 20, engine.layout.page_of_all_bytes, engine.swap)
    slots = swap.reserve(len(prompt.pages))
    swap.swap_out(prompt.pages, slots)
    other = new_prompt(engine, _TOKENS, 13)
    _prefill(engine, other)
    swap.swap_in(slots, other.pages)
    return _step(engine, other.pages), wanted


def _prefill(engine: Engine, prompt: Prompt) -> None:
    for _ in engine.runner.prefill_batch([task_of(prompt, 0, len(prompt.ids))]):
        pass
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)


def _step(engine: Engine, pages: list[int]) -> Tensor:
    at = torch.tensor([_TOKENS])
    logits = engine.runner.decode(torch.tensor([3]), at, page_table_of([pages]), (at + 1).int())
    return logits.float().cpu().clone()


def _close(found: Tensor, wanted: Tensor) -> tuple[bool, str]:
    error = float((found - wanted).abs().max() / wanted.std())
    return error <= _TOLERANCE, f"largest difference {error:.2g} standard deviations"
