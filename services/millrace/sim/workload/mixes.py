"""Synthetic workloads by name, where the papers' own traces were not published.

Lengths follow the published moments, arrivals are Poisson at the given rate unless the mix has gaps
of its own. Results from them must be called synthetic. Output lengths that no paper gives are drawn
from the moments of the Azure 2023 conversation trace (mean 211, standard deviation 163; CC-BY-4.0,
Splitwise, ISCA 2024).
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from millrace.core.errors import ConfigError
from millrace.sim.workload.arrivals import Gaps, bursts, day
from millrace.sim.workload.lengths import (
    SHAREGPT_INPUT,
    SHAREGPT_OUTPUT,
    by_quantiles,
    gamma,
    log_uniform,
    lognormal_by_quantiles,
    mixture,
    truncated_lognormal,
)
from millrace.sim.workload.traces import TraceRow
from millrace.sim.workload.workload import Draw, RowDraw, SloClass, lognormal

#: FlowPrefill, Table 2: TTFT objectives in seconds by model and class.
TABLE_2_TTFT_S: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "llama3-8b": {"text": 0.25, "image": 0.5, "search": 4.0, "file": 6.0},
        "qwen2.5-14b": {"text": 0.4, "image": 0.8, "search": 6.5, "file": 9.0},
        "llama3-70b": {"text": 1.0, "image": 2.0, "search": 15.0, "file": 18.0},
    }
)

LONG_TOKENS = (128_000, 1_000_000)  # Medha section 6.2, the mixed workload
LONG_FRACTION = 0.05

#: Prompts of our own classes, in tokens, log-uniform: each eight times as long as the one before.
CLASS_TOKENS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "chat": (100, 2_000),
        "retrieval": (2_000, 16_000),
        "document": (16_000, 128_000),
        "book": LONG_TOKENS,
    }
)
DAY_REQUESTS = 1_000
AGENT_SESSIONS = 40

_CHAT_OUTPUT = lognormal(211.1, 162.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixClass:
    """One kind of request; `slo.weight` is its share of the mix."""

    slo: SloClass
    input_tokens: Draw
    output_tokens: Draw = _CHAT_OUTPUT


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A workload of several kinds of request, drawn one by one.

    gaps: between arrivals; None: Poisson. rows: draws requests that depend on those before them;
    None: each is drawn by the classes' weights alone.
    """

    classes: tuple[MixClass, ...]
    gaps: Gaps | None = None
    rows: Callable[[], RowDraw] | None = None

    @property
    def slo_classes(self) -> tuple[SloClass, ...]:
        return tuple(kind.slo for kind in self.classes)

    def row_draw(self) -> RowDraw:
        """Draws the next request: by `rows`, or its class by weight and then its lengths."""
        if self.rows is not None:
            return self.rows()
        choose = mixture([kind.slo.weight for kind in self.classes])
        classes = self.classes

        def draw(rng: random.Random) -> TraceRow:
            kind = classes[choose(rng)]
            return TraceRow(
                arrival_s=None,
                input_tokens=kind.input_tokens(rng),
                output_tokens=kind.output_tokens(rng),
                class_name=kind.slo.name,
            )

        return draw


@dataclass(frozen=True, slots=True, kw_only=True)
class MixOptions:
    """The options of the mixes. `short_rows` replace medha-mix's shipped ShareGPT quantiles."""

    model: str = "llama3-8b"
    long_fraction: float = LONG_FRACTION
    short_rows: Sequence[TraceRow] = ()

    def __post_init__(self) -> None:
        if not 0.0 <= self.long_fraction <= 1.0:
            raise ConfigError(f"--long-fraction {self.long_fraction:g}: it must be between 0 and 1")


def table_2(model: str) -> Mapping[str, float]:
    """Returns FlowPrefill's TTFT objectives (s) of a model.

    Raises ConfigError where it has none.
    """
    if model not in TABLE_2_TTFT_S:
        raise ConfigError(
            f"model {model!r}: FlowPrefill's Table 2 has objectives for "
            f"{', '.join(TABLE_2_TTFT_S)} only"
        )
    return TABLE_2_TTFT_S[model]


def _qwen(options: MixOptions) -> Mix:
    """FlowPrefill's QwenTrace by Table 1's mean, deviation and shares, with Table 2's objectives.

    Gamma or lognormal, whichever comes nearer to Table 1's P99: lognormal for image alone.
    """
    ttft_s = table_2(options.model)
    lengths = {
        "text": (gamma(590, 652), 68),
        "image": (lognormal(532, 510), 8),
        "search": (gamma(5976, 3456), 20),
        "file": (gamma(6833, 5186), 4),
    }
    return Mix(
        classes=tuple(
            MixClass(
                slo=SloClass(name=name, ttft_s=ttft_s[name], weight=float(percent)),
                input_tokens=draw,
            )
            for name, (draw, percent) in lengths.items()
        )
    )


def _qwen_colocated(options: MixOptions) -> Mix:
    """The same where prefill shares its instances with decode: TTFT x 3, and TBT (section 6.5)."""
    tbt_s = {"text": 0.1, "image": 0.1, "search": 0.2, "file": 0.2}
    return Mix(
        classes=tuple(
            replace(
                kind,
                slo=replace(
                    kind.slo, ttft_s=3 * (kind.slo.ttft_s or 0.0), tbt_s=tbt_s[kind.slo.name]
                ),
            )
            for kind in _qwen(options).classes
        )
    )


def _sharegpt_2k(options: MixOptions) -> Mix:
    """FlowPrefill section 6.5's single objective: ShareGPT prompts of at most 2k tokens, as chat.

    Lengths by the shipped quantiles; prompt and output are drawn independently.
    """
    chat = SloClass(name="text", ttft_s=table_2(options.model)["text"])
    short = [tokens for tokens in SHAREGPT_INPUT if tokens <= 2048]
    return Mix(
        classes=(
            MixClass(
                slo=chat,
                input_tokens=by_quantiles(short),
                output_tokens=by_quantiles(SHAREGPT_OUTPUT),
            ),
        )
    )


def _tetris(name: str, low_k: int, high_k: int, mean_k: float) -> Callable[[MixOptions], Mix]:
    """Tetris section 7.1: only range and mean are public; 1k is taken as 1024 tokens."""

    def build(options: MixOptions) -> Mix:
        del options
        lengths = truncated_lognormal(low_k * 1024, high_k * 1024, mean_k * 1024)
        return Mix(classes=(MixClass(slo=SloClass(name=name), input_tokens=lengths),))

    return build


def _medha_mix(options: MixOptions) -> Mix:
    """Medha section 6.1: ShareGPT4 (8k at most) with a share of 128k to 1M token requests.

    Log-uniform prompts in that range have a median of 358k and a P90 of 814k tokens, beside the
    393k and 839k of MEDHA-SWE; outputs are lognormal by its P50 and P90 (518, 808).
    """
    rows = options.short_rows
    inputs = sorted(row.input_tokens for row in rows) or SHAREGPT_INPUT
    outputs = sorted(row.output_tokens for row in rows) or SHAREGPT_OUTPUT
    short = MixClass(
        slo=SloClass(name="short", weight=1.0 - options.long_fraction),
        input_tokens=by_quantiles(inputs),
        output_tokens=by_quantiles(outputs),
    )
    long = MixClass(
        slo=SloClass(name="long", weight=options.long_fraction),
        input_tokens=log_uniform(*LONG_TOKENS),
        output_tokens=lognormal_by_quantiles(518, 808),
    )
    return Mix(classes=tuple(kind for kind in (short, long) if kind.slo.weight > 0))


def _mixed(options: MixOptions) -> Mix:
    """Our own mix: from chats of a hundred tokens to documents of a million on one fleet.

    From no paper: log-uniform lengths, each class at least eight times as long as the class before
    it, and shares that give every class a good part of the prefill work.
    """
    del options
    return Mix(classes=_log_uniform_classes(chat=68.0, retrieval=25.0, document=6.0, book=1.0))


def _log_uniform_classes(**percents: float) -> tuple[MixClass, ...]:
    """Returns our own classes by their share, in percent."""
    return tuple(
        MixClass(
            slo=SloClass(name=name, weight=percent), input_tokens=log_uniform(*CLASS_TOKENS[name])
        )
        for name, percent in percents.items()
    )


def _bursts(options: MixOptions) -> Mix:
    """Ours: the mix of chats, retrieval and documents, of which a third comes in bursts.

    In a burst of 100 requests on average they come at three times the mean rate.
    """
    del options
    return Mix(
        classes=_log_uniform_classes(chat=70.0, retrieval=25.0, document=5.0),
        gaps=bursts(calm=200, burst=100, factor=3.0),
    )


def _diurnal(options: MixOptions) -> Mix:
    """Ours: a day of 1,000 requests. Its rate swings by 60 % around the middle, chats most at noon.

    Half as many documents come at noon as at midnight, when they are read in bulk.
    """
    del options
    noon = _log_uniform_classes(chat=75.0, retrieval=21.0, document=4.0)
    midnight = _log_uniform_classes(chat=51.0, retrieval=41.0, document=8.0)
    by_noon, by_midnight = Mix(classes=noon).row_draw(), Mix(classes=midnight).row_draw()

    def rows() -> RowDraw:
        indices = itertools.count()

        def draw(rng: random.Random) -> TraceRow:
            share_of_noon = (1 + math.sin(2 * math.pi * next(indices) / DAY_REQUESTS)) / 2
            return (by_noon if rng.random() < share_of_noon else by_midnight)(rng)

        return draw

    return Mix(classes=noon, gaps=day(DAY_REQUESTS, swing=0.6), rows=rows)


def _heavy_tail(options: MixOptions) -> Mix:
    """Ours: lognormal prompts (median 1,000 tokens, P90 8,000, at most 128k), and 1 % of 1M."""
    del options
    draw = lognormal_by_quantiles(1_000, 8_000)
    prompt = MixClass(
        slo=SloClass(name="prompt", weight=99.0),
        input_tokens=lambda rng: min(128_000, draw(rng)),
    )
    million = MixClass(
        slo=SloClass(name="million", weight=1.0), input_tokens=lambda rng: LONG_TOKENS[1]
    )
    return Mix(classes=(prompt, million))


def _agents(options: MixOptions) -> Mix:
    """Ours: agents that read a document of 16k to 128k tokens and then take turns on it.

    One request in 16 opens a session. A turn prefills what the last answer and its tools added
    (lognormal, median 600 tokens, P90 4,000), or, one time in 25, all of its session again, because
    its KV was evicted. 40 sessions are open at a time.
    """
    del options
    document = MixClass(slo=SloClass(name="document"), input_tokens=log_uniform(16_000, 128_000))
    turn = MixClass(slo=SloClass(name="turn"), input_tokens=lognormal_by_quantiles(600, 4_000))

    def rows() -> RowDraw:
        sessions: deque[int] = deque(maxlen=AGENT_SESSIONS)  # tokens of each; the oldest ends

        def draw(rng: random.Random) -> TraceRow:
            if not sessions or rng.random() < 1 / 16:
                sessions.append(document.input_tokens(rng))
                return row(rng, document, sessions[-1])
            place = rng.randrange(len(sessions))
            added = turn.input_tokens(rng)
            sessions[place] += added
            if rng.random() < 1 / 25:
                return row(rng, document, sessions[place])
            return row(rng, turn, added)

        return draw

    def row(rng: random.Random, kind: MixClass, tokens: int) -> TraceRow:
        return TraceRow(
            arrival_s=None,
            input_tokens=tokens,
            output_tokens=kind.output_tokens(rng),
            class_name=kind.slo.name,
        )

    return Mix(classes=(document, turn), rows=rows)


#: Every mix by name.
MIXES: Mapping[str, Callable[[MixOptions], Mix]] = MappingProxyType(
    {
        "qwen": _qwen,
        "qwen-colocated": _qwen_colocated,
        "sharegpt-2k": _sharegpt_2k,
        "tetris-short": _tetris("short", 4, 95, 23.6),
        "tetris-medium": _tetris("medium", 8, 142, 32.8),
        "tetris-long": _tetris("long", 16, 190, 50.1),
        "medha-mix": _medha_mix,
        "mixed": _mixed,
        "agents": _agents,
        "heavy-tail": _heavy_tail,
        "bursts": _bursts,
        "diurnal": _diurnal,
    }
)


def build_mix(name: str, options: MixOptions) -> Mix:
    """Returns the mix of that name. Raises ConfigError for an unknown name."""
    if name not in MIXES:
        raise ConfigError(f"--mix {name!r}: there are {', '.join(MIXES)}")
    return MIXES[name](options)
