"""`millrace bench constraints`: measures what the masks of constrained answers cost decode.

A random-weight Llama of about 100 million parameters decodes two batches of the same size and
context in this process: one of free answers, one whose answers follow a constraint. Their steps
take turns, so that both meet the same machine. All sequences draw at temperature 1. A sequence that
has ended is replaced between two steps, which no clock sees. The cost is the difference of the
median steps, as a share of the free one.

The vocabulary is synthetic: all bytes, JSON's punctuation, and words of one to four syllables with
and without a space before them. Masks of a real vocabulary differ with its tokens.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from millrace.bench.common.models import kv_bytes
from millrace.bench.common.random_model import write_random_llama
from millrace.bench.constraints.command import Settings
from millrace.core.config import EngineConfig
from millrace.core.request_spec import Constraint
from millrace.engine.assembly import Engine, open_engine
from millrace.engine.decode_batch import DecodeBatch, Sequence
from millrace.engine.sampling.sampler import Sampler
from millrace.engine.sampling.spec import SamplingSpec
from millrace.grammar.matcher import Grammars

#: Goal: the share of a step of 8 sequences.
GOAL_SHARE: Final = 0.03

_EOS: Final = 0
_WARM_UP: Final = 3
_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["house", "bridge", "mill"]},
        "size": {"type": "integer", "minimum": 0},
        "parts": {
            "type": "array",
            "minItems": 20,
            "items": {
                "type": "object",
                "properties": {"label": {"type": "string"}, "weight": {"type": "number"}},
                "required": ["label", "weight"],
            },
        },
    },
    "required": ["name", "kind", "size", "parts"],
}
#: Long names and no white space: most of the text is forced.
_NAMES: Final = {
    "type": "object",
    "properties": {
        "location_of_the_weather_station": {"type": "string", "maxLength": 12},
        "unit_of_temperature": {"enum": ["celsius", "fahrenheit"]},
        "include_forecast_days": {"type": "integer", "minimum": 0, "maximum": 14},
    },
    "required": ["location_of_the_weather_station", "unit_of_temperature", "include_forecast_days"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None},
}
CONSTRAINTS: Final = {
    "json_object": Constraint(kind="json_object", text=""),
    "json_schema": Constraint(kind="json_schema", text=json.dumps(_SCHEMA)),
    "json_names": Constraint(kind="json_schema", text=json.dumps(_NAMES)),
    "regex": Constraint(kind="regex", text=r"([A-Z][a-z]{2,12}( [a-z]{1,12}){3,20}\. ){5,50}"),
    "choice": Constraint(
        kind="choice", text=json.dumps([f"answer {i} of a long list" for i in range(500)])
    ),
}


def run(
    settings: Settings,
    on_progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Any]:
    """Measures and returns the report as one JSON-ready document."""
    with tempfile.TemporaryDirectory() as name:
        engine, grammars = _open(Path(name), settings)
        results = []
        for done, kind in enumerate(settings.kinds):
            on_progress(done, len(settings.kinds), kind)
            results.append(_measure(engine, grammars, settings, kind))
        on_progress(len(settings.kinds), len(settings.kinds), "")
        grammars.close()
        engine.close()
    return {
        "benchmark": "constraints",
        "settings": {**asdict(settings), "model": dict(settings.model)},
        "goal_share": GOAL_SHARE,
        "cpus": os.cpu_count(),
        "results": results,
    }


def _open(folder: Path, settings: Settings) -> tuple[Engine, Grammars]:
    model = {**settings.model, "vocab_size": settings.vocabulary, "eos_token_id": _EOS}
    write_random_llama(folder, model)
    write_tokenizer(folder, settings.vocabulary)
    tokens = 2 * (settings.batch + 1) * (settings.context_tokens + _longest(settings) + 64)
    config = EngineConfig(
        dtype=settings.dtype,
        threads=settings.threads,
        kv_bytes=kv_bytes(model, tokens, settings.dtype),
        device="cpu",
    )
    engine = open_engine(folder, config)
    engine.pool.storage.normal_()
    return engine, Grammars(folder, settings.vocabulary, [_EOS])


def _longest(settings: Settings) -> int:
    return settings.steps + _WARM_UP + 2


def _measure(engine: Engine, grammars: Grammars, settings: Settings, kind: str) -> dict[str, Any]:
    begun = time.perf_counter()
    grammars.prepare(CONSTRAINTS[kind]).result()
    compile_ms = 1e3 * (time.perf_counter() - begun)
    free = _Batch(engine, Sampler(), settings, None)
    constrained = _Batch(engine, Sampler(grammars), settings, CONSTRAINTS[kind])
    took: dict[_Batch, list[float]] = {free: [], constrained: []}
    for number in range(_WARM_UP + settings.steps):
        for batch in took if number % 2 else reversed(took):
            took[batch].append(batch.step_s())
    for batch in took:
        batch.close()
    free_ms, constrained_ms = (1e3 * statistics.median(all_s[_WARM_UP:]) for all_s in took.values())
    return {
        "kind": kind,
        "compile_ms": compile_ms,
        **_masks(grammars, settings, CONSTRAINTS[kind]),
        "free_step_ms": free_ms,
        "constrained_step_ms": constrained_ms,
        "cost_share": constrained_ms / free_ms - 1.0,
    }


def _masks(grammars: Grammars, settings: Settings, constraint: Constraint) -> dict[str, Any]:
    """Times single masks along answers that are drawn evenly from what the masks allow.

    `forced_share` are the masks that allow one token only: the steps that an exact jump forward
    could save at most.
    """
    drawn = random.Random(1)
    matcher, took, forced = grammars.matcher(constraint), [], 0
    for _ in range(settings.steps):
        begun = time.perf_counter()
        mask = matcher.mask()
        took.append(1e6 * (time.perf_counter() - begun))
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        forced += len(allowed) == 1
        token_id = int(drawn.choice(allowed))
        if token_id == _EOS:
            matcher = grammars.matcher(constraint)
        else:
            matcher.consume(token_id)
    return {
        "mask_us": {"p50": float(np.percentile(took, 50)), "p99": float(np.percentile(took, 99))},
        "forced_share": forced / len(took),
    }


class _Batch:
    """A decode batch that stays full."""

    def __init__(
        self, engine: Engine, sampler: Sampler, settings: Settings, constraint: Constraint | None
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._constraint = constraint
        self._first = self._first_token(sampler)
        self._batch = DecodeBatch(engine.runner, engine.pool, sampler, max_batch=settings.batch)
        self._numbers = itertools.count()
        self._pages: dict[str, list[int]] = {}
        self._fill()

    def step_s(self) -> float:
        """Takes a step and returns its time; then replaces the sequences that have ended."""
        with torch.inference_mode():
            begun = time.perf_counter()
            outs = self._batch.step()
            took_s = time.perf_counter() - begun
        for out in outs:
            assert not out.error, out.error
            if out.finish_reason:
                self._engine.pool.free(self._pages.pop(out.request_id))
        self._fill()
        return took_s

    def close(self) -> None:
        for name, pages in self._pages.items():
            self._batch.remove(name)
            self._engine.pool.free(pages)

    def _fill(self) -> None:
        while self._batch.size < self._settings.batch:
            name = str(next(self._numbers))
            spec = self._spec(int(name))
            tokens = self._settings.context_tokens + spec.max_tokens
            pages = self._pages[name] = self._engine.pool.allocate(
                self._engine.layout.pages_for(tokens)
            )
            self._batch.add(
                Sequence(
                    request_id=name,
                    choice=0,
                    pages=pages,
                    prompt_tokens=self._settings.context_tokens,
                    first_token_id=self._first,
                    spec=spec,
                )
            )

    def _spec(self, seed: int) -> SamplingSpec:
        stop = () if self._constraint is None else (_EOS,)
        return SamplingSpec(
            max_tokens=_longest(self._settings),
            temperature=1.0,
            seed=seed,
            stop_token_ids=stop,
            constraint=self._constraint,
        )

    def _first_token(self, sampler: Sampler) -> int:
        """Returns a token that an answer may begin with."""
        logits = torch.zeros(1, self._settings.vocabulary)
        sampled = sampler.sample(logits, [sampler.row(self._spec(0))])
        return sampled.token_ids[0]


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Writes a byte-level tokenizer.json of so many tokens; token 0 ends a sequence."""
    tokens = {"<|end|>": _EOS}
    pieces = itertools.chain(sorted(pre_tokenizers.ByteLevel.alphabet()), _pieces())
    while len(tokens) < vocabulary:
        tokens.setdefault(next(pieces), len(tokens))
    tokenizer = Tokenizer(models.BPE(tokens, []))
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


def _pieces() -> Iterator[str]:
    """Yields marks of JSON, numbers and pseudo-words, in the alphabet of byte-level tokens."""
    yield from (
        '":',
        '",',
        '{"',
        '"}',
        '["',
        '"]',
        "],",
        "},",
        "}}",
        '":"',
        '","',
        "\u0120{",
        "\u0120[",
    )
    yield from map(str, range(1000))
    drawn = random.Random(0)
    syllables = [
        c + v + e for c in "bcdfghklmnprstvw" for v in "aeiou" for e in ("", "n", "r", "s")
    ]
    while True:
        word = "".join(drawn.choices(syllables, k=drawn.randint(1, 4)))
        yield word
        yield "\u0120" + word
        yield "\u0120" + word.capitalize()
