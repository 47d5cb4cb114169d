"""Train the small demonstration model and write it as a Hugging Face folder.

    python models/train_tiny.py --out models/millrace-tiny --minutes 20

One CPU core is enough. The corpus comes from the grammar in this folder; nothing is downloaded.
`--seed` fixes the first weights and the text. Minutes are processor time, and they decide how many
steps fit, so two runs on machines of different speed differ.

The phases go from short packed sequences to 8k ones. In the 2k phase half of the batches skip
positions, so that distances of up to 16k are met at the price of 2k tokens (Zhu et al., "PoSE",
2024, section 3; here the skips fall at random places, without their chunk heuristics). Matrices are
updated by Muon (Jordan et al., 2024); the embedding, the norms and the two attention layers that
`tiny_start.py` sets by hand by AdamW.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import time
from itertools import islice
from pathlib import Path

import torch
from tiny_corpus import documents
from tiny_folder import special_id, train_tokenizer, write_tokenizer, write_weights
from tiny_llama import TinyConfig, TinyLlama
from tiny_start import HAND_SET, start_with_induction
from tiny_text import EOS
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

MUON_LR, ADAM_LR, HAND_SET_LR = 0.004, 0.001, 0.0003
BETAS = (0.9, 0.98)
WARMUP_STEPS = 40
FINAL_LR = 0.05
POOL_DOCUMENTS = 32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of the training, up to the share `until` of its time."""

    until: float
    length: int
    rows: int
    long_share: float
    skip_share: float = 0.0


PHASES = (
    Phase(until=0.25, length=384, rows=6, long_share=0.0),
    Phase(until=0.62, length=512, rows=8, long_share=0.0),
    Phase(until=0.85, length=2048, rows=2, long_share=0.5, skip_share=0.5),
    Phase(until=0.93, length=4096, rows=1, long_share=0.6),
    Phase(until=1.0, length=8192, rows=1, long_share=0.7),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """ids int64 [rows, length + 1]; weights float32 [rows, length], of the tokens to predict."""

    ids: Tensor
    weights: Tensor


class Packer:
    """Packs whole documents into rows; a document longer than a row is left out."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        self.pad_id = special_id(tokenizer, EOS)
        self.pool: list[tuple[list[int], list[float]]] = []

    def _refill(self, phase: Phase) -> None:
        stream = documents(
            self.rng, long_tokens=phase.length * 17 // 20, long_share=phase.long_share
        )
        for document in islice(stream, POOL_DOCUMENTS):
            encoded = self.tokenizer.encode_batch(
                [segment.text for segment in document], add_special_tokens=False
            )
            ids = [i for item in encoded for i in item.ids]
            weights = [
                segment.weight
                for segment, item in zip(document, encoded, strict=True)
                for _ in item.ids
            ]
            self.pool.append((ids, weights))

    def _row(self, phase: Phase) -> tuple[list[int], list[float]]:
        size = phase.length + 1
        ids: list[int] = []
        weights: list[float] = []
        while True:
            self.pool = [item for item in self.pool if len(item[0]) <= size]
            if len(self.pool) < POOL_DOCUMENTS // 2:
                self._refill(phase)
                continue
            room = size - len(ids)
            index = next((i for i, item in enumerate(self.pool) if len(item[0]) <= room), None)
            if index is None:
                return ids + [self.pad_id] * room, weights + [0.0] * room
            more_ids, more_weights = self.pool.pop(index)
            ids += more_ids
            weights += more_weights

    def batch(self, phase: Phase) -> Batch:
        rows = [self._row(phase) for _ in range(phase.rows)]
        weights = torch.tensor([weights for _, weights in rows])
        return Batch(torch.tensor([ids for ids, _ in rows]), weights[:, 1:].contiguous())


def skipped_positions(rng: random.Random, length: int, limit: int) -> Tensor:
    """0 .. length - 1 with one to three jumps, all below `limit`."""
    positions = torch.arange(length)
    room = limit - length
    for _ in range(rng.randint(1, 3)):
        jump = rng.randint(0, room)
        positions[rng.randrange(length) :] += jump
        room -= jump
    return positions


def weighted_loss(hidden: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy in nats; hidden [b, l, hidden], targets and weights [b, l]."""
    logits = functional.linear(hidden, embedding).flatten(0, 1).float()
    losses = functional.cross_entropy(logits, targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


class Trainer:
    """bfloat16 weights for the sums, float32 masters for the updates."""

    def __init__(self, config: TinyConfig, *, compile_model: bool) -> None:
        self.config = config
        self.model = TinyLlama(config)
        start_with_induction(self.model)
        self.masters = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.model.bfloat16()
        self.loss = weighted_loss
        if compile_model:
            # Layer by layer: all layers share one compiled form, so that compiling takes seconds.
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)
            self.loss = torch.compile(weighted_loss, dynamic=False)
        hand_set = [n for n in self.masters if n.startswith(HAND_SET)]
        other = [n for n, p in self.masters.items() if p.dim() != 2 or "embed" in n]
        rest = [n for n in self.masters if n not in hand_set and n not in other]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(
                self._pick(rest), lr=MUON_LR, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(self._pick(other), lr=ADAM_LR, betas=BETAS, weight_decay=0.0),
            torch.optim.AdamW(self._pick(hand_set), lr=HAND_SET_LR, betas=BETAS, weight_decay=0.0),
        )
        self.base_lrs = (MUON_LR, ADAM_LR, HAND_SET_LR)

    def _pick(self, names: list[str]) -> list[Tensor]:
        return [self.masters[name] for name in names]

    def batch_loss(self, batch: Batch, positions: Tensor) -> Tensor:
        hidden = self.model.hidden(batch.ids[:, :-1].contiguous(), positions)
        targets = batch.ids[:, 1:].contiguous()
        return self.loss(hidden, self.model.model.embed_tokens.weight, targets, batch.weights)

    def step(self, batch: Batch, positions: Tensor, lr_factor: float) -> float:
        loss = self.batch_loss(batch, positions)
        torch.autograd.backward(loss)
        for name, weight in self.model.named_parameters():
            assert weight.grad is not None
            self.masters[name].grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters.values(), 1.0)
        for optimizer, base in zip(self.optimizers, self.base_lrs, strict=True):
            optimizer.param_groups[0]["lr"] = base * lr_factor
            optimizer.step()
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.copy_(self.masters[name])
        return loss.item()


def lr_factor(step: int, progress: float) -> float:
    """Linear warm-up, then a cosine down to FINAL_LR."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def held_out_loss(trainer: Trainer, tokenizer: Tokenizer, phase: Phase, batches: int) -> float:
    """Mean weighted loss over text from a seed that training never uses."""
    packer = Packer(tokenizer, seed=987_654)
    total = 0.0
    for _ in range(batches):
        batch = packer.batch(phase)
        total += trainer.batch_loss(batch, torch.arange(phase.length)).item()
    return total / batches


def train(trainer: Trainer, tokenizer: Tokenizer, *, minutes: float, seed: int, out: Path) -> int:
    """Run the phases until the processor time is up. Returns the number of tokens seen."""
    packer = Packer(tokenizer, seed)
    start, step, tokens, shown, smooth = time.process_time(), 0, 0, 0.0, 0.0
    while (progress := (time.process_time() - start) / (60 * minutes)) < 1.0:
        phase = next(p for p in PHASES if progress < p.until)
        batch = packer.batch(phase)
        positions = torch.arange(phase.length)
        if packer.rng.random() < phase.skip_share:
            limit = trainer.config.max_context_tokens
            positions = skipped_positions(packer.rng, phase.length, limit)
        loss = trainer.step(batch, positions, lr_factor(step, progress))
        smooth = loss if step == 0 else 0.95 * smooth + 0.05 * loss
        step, tokens = step + 1, tokens + phase.rows * phase.length
        elapsed = time.process_time() - start
        if elapsed - shown > 10.0:
            shown = elapsed
            print(
                f"{elapsed:6.0f} s  step {step:5d}  {tokens / 1e6:6.2f} M tokens  "
                f"length {phase.length:5d}  loss {smooth:.3f}  {tokens / elapsed:6.0f} tokens/s",
                flush=True,
            )
            write_weights(out, trainer.masters)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/millrace-tiny"))
    parser.add_argument("--minutes", type=float, default=20.0, help="of processor time")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--vocab", type=int, default=1536)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="faster; needs a C++ compiler")
    parser.add_argument("--json", type=Path, help="write the losses to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(args.seed, args.vocab)
    config = TinyConfig(vocab_size=tokenizer.get_vocab_size())
    write_tokenizer(args.out, tokenizer, config)
    trainer = Trainer(config, compile_model=args.compile)
    size = sum(p.numel() for p in trainer.masters.values())
    print(f"{size / 1e6:.2f} M parameters, vocabulary of {config.vocab_size}", flush=True)
    tokens = train(trainer, tokenizer, minutes=args.minutes, seed=args.seed, out=args.out)
    write_weights(args.out, trainer.masters)
    report: dict[str, object] = {
        "parameters": size,
        "tokens": tokens,
        "held_out_loss": {
            p.length: round(
                held_out_loss(trainer, tokenizer, p, max(1, 16384 // p.length // p.rows)), 4
            )
            for p in PHASES
        },
    }
    print(json.dumps(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
