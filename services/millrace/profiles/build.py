"""Builds the shipped profiles from public measurements; run by hand when the sources change.

    python -m millrace.profiles.build --source DIR

DIR holds the files that README.md lists. The same files give the same bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from types import MappingProxyType

from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.cost.operators import DecodeAttention, OperatorModel, Table
from millrace.core.cost.profile import Profile
from millrace.profiles import calibration as fitted
from millrace.profiles import encode, validation
from millrace.profiles.eq_1 import fit, latency, rounded
from millrace.profiles.measured import (
    Device,
    papers,
    refined,
    send_bytes_s,
    table,
    vidur_layer,
)

DEGREES = (1, 2, 4, 8, 16, 32, 64, 128)
FIT_TOKENS = tuple(128 << i for i in range(12))  # 128 to 256k

#: Seconds of a pass outside of all kernels: launching a captured graph, sampling.
PASS_OVERHEAD_S = 1e-3

#: HBM bytes per second; element-wise work is scaled by it from A100 to the others.
HBM_BYTES_S = {"a100": 2.039e12, "h100": 3.35e12, "h200": 4.8e12}
#: Bytes per second of one GPU's network card: Tetris section 7.1, Mnemosyne section 6.
RDMA_BYTES_S = {"a100": 25e9, "h100": 50e9, "h200": 50e9}
#: The same for a worker without RDMA.
TCP_BYTES_S = 2.5e9


@dataclass(frozen=True)
class Model:
    """A model's shapes."""

    name: str
    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 128

    @property
    def kv_bytes_per_token(self) -> int:
        """Returns the bytes of one token's keys and values in bf16, in all layers."""
        return 2 * self.kv_heads * self.head_dim * 2 * self.layers

    def gemms(self, tp: int) -> Mapping[str, tuple[int, int]]:
        """Returns operator -> (n, k) of one rank."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv_proj": ((q + 2 * kv) // tp, self.width),
            "o_proj": (self.width, q // tp),
            "gate_up_proj": (2 * self.ffn // tp, self.width),
            "down_proj": (self.width, self.ffn // tp),
        }


LLAMA3_8B = Model("llama3-8b", 32, 4096, 14336, 32, 8, 128256)
LLAMA3_70B = Model("llama3-70b", 80, 8192, 28672, 64, 8, 128256)
BUILDS = tuple(
    (model, device, tp)
    for model, degrees in ((LLAMA3_8B, (1, 8)), (LLAMA3_70B, (4, 8)))
    for device in ("a100", "h100", "h200")
    for tp in degrees
)


class Builder:
    """Builds profiles from one source folder, and fits their common constants once."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._device = cache(lambda name: Device(source, name))
        self._table_1 = fitted.table_1(papers(source))
        self._ring_step_s = fitted.ring_step_s(self._table_1, LLAMA3_8B.layers)
        vidur = vidur_layer(source, "a100_llama3-8b", 1)
        self._long_factor = self._long_attention()
        self._elementwise = fitted.elementwise(vidur, self._gaps_s(), LLAMA3_8B.layers)
        bare = self._operators(LLAMA3_8B, "h100", 8, kvp_message_s=0.0)
        self._kvp_message_s = fitted.kvp_message_s(bare)

    def profile(self, model: Model, device: str, tp: int) -> Profile:
        """Builds one profile with its errors."""
        operators = self._operators(model, device, tp, self._kvp_message_s)
        bare = Profile(
            name=f"{model.name}-{device}-tp{tp}",
            model=model.name,
            device=device,
            tp=tp,
            layers=model.layers,
            kv_bytes_per_token=model.kv_bytes_per_token,
            prefill=self._prefill(model, device, tp, operators),
            operators=operators,
            kv_transfer_bytes_s=MappingProxyType(self._transfer(device, tp)),
            ring_step_s=self._ring_step_s,
            measured_sp=tuple(sp for sp in self._measured(model, device, tp) if sp > 1),
            sources=_sources(model, device, tp),
            assumptions=_assumptions(model, device, tp),
        )
        attn = table(
            self._device(device).prefill_attention(model.heads // tp, model.kv_heads // tp)
        )
        errors = validation.errors(self._device(device), model.gemms(tp), tp, attn, operators)
        checks = validation.checks(self._source, bare, self._table_1)
        return replace(bare, errors=MappingProxyType(errors), checks=MappingProxyType(checks))

    def _gaps_s(self) -> list[float]:
        """Returns Table 1, SP 1, less the pass's overhead, GEMMs and attention, from 4k to 16k
        tokens.
        """
        device, gemms = self._device("a100"), self._gemms(LLAMA3_8B, "a100", 1).values()
        attn = table(device.prefill_attention(LLAMA3_8B.heads, LLAMA3_8B.kv_heads))
        gaps = []
        for tokens, seconds in self._table_1[1]:
            if tokens > 16 * fitted.K:
                break
            layer_s = sum(gemm.at(tokens) for gemm in gemms) + attn.at(tokens**2)
            gaps.append(seconds - PASS_OVERHEAD_S - LLAMA3_8B.layers * layer_s)
        return gaps

    def _operators(
        self, model: Model, device_name: str, tp: int, kvp_message_s: float
    ) -> OperatorModel:
        device = self._device(device_name)
        heads, kv_heads = model.heads // tp, model.kv_heads // tp
        beside = self._beside(model, device_name, tp)
        linear = {
            name: _round_table({m: gemm.at(m) + beside[name].at(m) for m in gemm.xs})
            for name, gemm in self._gemms(model, device_name, tp).items()
        }
        decode, kv_read_s = self._decode(device, heads, kv_heads)
        head = {
            m: device.gemm_s(m, model.vocab // tp, model.width) for m in device.tokens if m <= 1024
        }
        # q and the partial output in bf16, the log-sum-exp in float32, over one network card.
        kvp_bytes = heads * (2 * model.head_dim * 2 + 4)
        return OperatorModel(
            layers=model.layers,
            **linear,
            attn=self._attn(device_name, heads, kv_heads),
            attn_call_s=0.0,  # launches are in PASS_OVERHEAD_S
            history_factor=Table(xs=(1.0,), ys=(1.0,)),
            kv_read_s=kv_read_s,
            decode_attn=decode,
            lm_head=_round_table(head),
            overhead_s=PASS_OVERHEAD_S,
            kvp_message_s=kvp_message_s,
            kvp_token_s=rounded(kvp_bytes / RDMA_BYTES_S[device_name]),
        )

    def _gemms(self, model: Model, device_name: str, tp: int) -> Mapping[str, Table]:
        """Returns operator -> seconds of one layer's GEMM over tokens.

        The last point is extrapolated: beyond the longest measurement, time grows with the tokens.
        """
        device, found = self._device(device_name), {}
        for name, (n, k) in model.gemms(tp).items():
            points = {m: device.gemm_s(m, n, k) for m in device.tokens}
            last = max(points)
            points[64 * last] = 64 * points[last]
            found[name] = table(points)
        return found

    def _attn(self, device: str, heads: int, kv_heads: int) -> Table:
        """Returns prefill attention, extrapolated beyond the 16k tokens measured.

        On A100 with the share of the measured slope that Table 1 shows; for the others no data
        exist.
        """
        points = dict(self._device(device).prefill_attention(heads, kv_heads))
        measured = table(points)
        factor = self._long_factor if device == "a100" else 1.0
        last = measured.xs[-1]
        far = 64 * last
        points[far] = measured.ys[-1] + factor * fitted.long_slope(measured) * (far - last)
        fine = refined(table(points))
        return _round_table(dict(zip(fine.xs, fine.ys, strict=True)))

    @staticmethod
    def _decode(device: Device, heads: int, kv_heads: int) -> tuple[DecodeAttention, float]:
        """Returns decode attention and the seconds to read a token's KV with a batch that fills the
        GPU.

        Each row is extrapolated at that rate: the measured kernels split a short batch's context
        into too few parts to fill a GPU, which a context of millions need not suffer from.
        """
        measured = device.decode_attention(heads, kv_heads)
        filled = [row for batch, row in measured.items() if 16 <= batch <= 256]
        read_s = median((row[max(row)] - row[max(row) / 2]) / (max(row) / 2) for row in filled)
        tables = []
        for row in measured.values():
            far = 64 * max(row)
            tables.append(_round_table({**row, far: row[max(row)] + read_s * (far - max(row))}))
        decode = DecodeAttention(batches=tuple(measured), tables=tuple(tables))
        return decode, rounded(read_s)

    def _long_attention(self) -> float:
        """Returns `fitted.long_factor` of A100."""
        device, gemms = self._device("a100"), self._gemms(LLAMA3_8B, "a100", 1).values()
        attn = table(device.prefill_attention(LLAMA3_8B.heads, LLAMA3_8B.kv_heads))
        layers = LLAMA3_8B.layers
        return fitted.long_factor(
            self._table_1[1], attn, lambda m: layers * sum(gemm.at(m) for gemm in gemms), layers
        )

    def _beside(self, model: Model, device: str, tp: int) -> Mapping[str, Table]:
        """Returns operator -> seconds over tokens of the remaining work: element-wise work,
        all-reduces.
        """
        work, memory = self._elementwise, HBM_BYTES_S["a100"] / HBM_BYTES_S[device]
        wide = model.width / LLAMA3_8B.width
        norm, add = work.shares["norm"] * wide, work.shares["add"] * wide
        rope = work.shares["rope"] * model.heads / tp / LLAMA3_8B.heads
        act = work.shares["act"] * model.ffn / tp / LLAMA3_8B.ffn
        shares = {
            "qkv_proj": norm + rope,
            "o_proj": add,
            "gate_up_proj": norm + act,
            "down_proj": add,
        }
        gpu = self._device(device)
        reduce = table(gpu.all_reduce(tp)) if tp > 1 else None
        tables = {}
        for name, share in shares.items():
            launch_s = work.launch_s / len(shares)
            level_s = max(work.level_s * share * memory, launch_s)
            ramp = Table(xs=(1.0, float(work.ramp_tokens)), ys=(launch_s, level_s))
            measured = (*gpu.tokens, 64 * gpu.tokens[-1])
            points = {m: ramp.at(min(m, work.ramp_tokens)) for m in measured}
            if reduce and name in ("o_proj", "down_proj"):
                points = {m: s + reduce.at(m * model.width) for m, s in points.items()}
            tables[name] = table(points)
        return tables

    def _prefill(self, model: Model, device: str, tp: int, operators: OperatorModel) -> SpLatency:
        measured = self._measured(model, device, tp)
        if not measured:
            passes = tuple((m, rounded(validation.prefill_s(operators, m))) for m in FIT_TOKENS)
            measured[1] = latency(*fit(passes), passes)
        step_s = self._ring_step_s
        return SpLatency(
            by_sp=MappingProxyType(
                {
                    sp: measured.get(sp) or fitted.ring(measured[1], sp, model.layers, step_s)
                    for sp in DEGREES
                }
            )
        )

    def _measured(self, model: Model, device: str, tp: int) -> dict[int, Latency]:
        """Returns measured latencies by SP degree; empty except for the testbed of Table 1."""
        if (model, device, tp) != (LLAMA3_8B, "a100", 1):
            return {}
        return {sp: latency(*fit(points), points) for sp, points in self._table_1.items()}

    def _transfer(self, device: str, tp: int) -> dict[str, float]:
        # H200's links were not measured; they are those of H100.
        link = send_bytes_s(self._source, "a100" if device == "a100" else "h100")
        return {
            "nvlink": rounded(link * tp),
            "rdma": RDMA_BYTES_S[device] * tp,
            "tcp": TCP_BYTES_S,
        }


def _round_table(points: Mapping[float, float]) -> Table:
    return table({x: rounded(y) for x, y in points.items()})


def _sources(model: Model, device: str, tp: int) -> tuple[str, ...]:
    """Returns the sources of a profile's numbers."""
    sources = [
        f"GEMM, attention{' and all-reduce' if tp > 1 else ''} of {device.upper()}: "
        "ai-dynamo/aiconfigurator 095f58a5, vLLM 0.14.0 data, Apache-2.0, (c) NVIDIA",
        "Element-wise kernels, sends within a node: microsoft/vidur 7d475133, MIT, (c) Microsoft",
        "Ring step and constant of a prefill: Tetris (CDSP) Table 1",
        "KVP rounds: Medha section 3.3, Mnemosyne section 6",
    ]
    if (model, device, tp) == (LLAMA3_8B, "a100", 1):
        sources.append("Prefill of SP 1 to 16: the points of Tetris Table 1, 1k = 1024 tokens")
    return tuple(sources)


def _assumptions(model: Model, device: str, tp: int) -> tuple[str, ...]:
    """Returns the assumptions for values that were not measured."""
    found = [
        "c = 2 d (FLOP counting): no prefill attention with long history was measured on this GPU",
        "history is worked off at the rate of long prompts in any chunk (KV split, as in Medha)",
        "GEMM shapes between measured ones are interpolated in n and k, beyond them extended in n",
        f"element-wise work {'measured' if device == 'a100' else 'scaled by HBM bandwidth'}, "
        "at most the constant by which Table 1 exceeds GEMMs and attention",
        f"{PASS_OVERHEAD_S * 1e3:g} ms a pass for launching and sampling",
        "tcp: 2.5 GB/s; rdma: one card a GPU, 200 Gb/s (A100) or 400 Gb/s (H100, H200)",
        "SP degrees above 16 by the ring model",
    ]
    if (model, device, tp) != (LLAMA3_8B, "a100", 1):
        found.append("all SP degrees by the ring model, with the ring step of Table 1")
    if device == "h200":
        found.append("NVLink as on H100")
    return tuple(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes every profile and prints its errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args(arguments)
    builder = Builder(options.source)
    for model, device, tp in BUILDS:
        profile = builder.profile(model, device, tp)
        (options.out / f"{profile.name}.json").write_text(encode(profile.to_json()), "utf-8")
        for kind, found in (("errors", profile.errors), ("checks", profile.checks)):
            print(f"{profile.name} {kind}", *(f"{k}={v:.2%}" for k, v in found.items()))


if __name__ == "__main__":
    main()
