"""Answers that follow a grammar: the sampler bars every other token."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from millrace.core.request_spec import Constraint
from millrace.engine.sampling.sampler import Sampler, SamplingRow, SamplingSpec, finish_reason
from millrace.grammar.matcher import Grammars
from millrace.grammar.source import GrammarError
from support.json_schemas import schemas

FOLDER = Path(__file__).parents[2] / "models" / "millrace-tiny"
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
VOCAB = 1600  # more logits than tokens, as many models have
EOS = (5, 1)
SCHEMAS = 320


@pytest.fixture(scope="module")
def sampler():
    grammars = Grammars(FOLDER, VOCAB, EOS)
    yield Sampler(grammars)
    grammars.close()


def spec_of(kind: str, text: str = "", **options: Any) -> SamplingSpec:
    options = {"max_tokens": 600, "temperature": 1.0, "stop_token_ids": EOS} | options
    return SamplingSpec(constraint=Constraint(kind=kind, text=text), **options)


def schema_spec(schema: object, **options: Any) -> SamplingSpec:
    return spec_of("json_schema", json.dumps(schema), **options)


def answers(
    sampler: Sampler, rows: list[SamplingRow], logits_seed: int = 0
) -> list[tuple[list[int], str]]:
    """Returns token ids and finish reason of each row, drawn from random logits."""
    random_logits = torch.Generator().manual_seed(logits_seed)
    found: list[tuple[list[int], str]] = [([], "") for _ in rows]
    while any(not reason for _, reason in found):
        open_rows = [i for i, (_, reason) in enumerate(found) if not reason]
        logits = torch.randn(len(rows), VOCAB, generator=random_logits)
        logits[:, 0] += 5  # the likeliest token is a special one
        sampled = sampler.sample(logits[open_rows], [rows[i] for i in open_rows])
        assert not sampled.errors
        for i, token_id in zip(open_rows, sampled.token_ids, strict=True):
            rows[i].append(token_id)
            ids = [*found[i][0], token_id]
            found[i] = ids, finish_reason(rows[i].spec, len(ids), token_id)
    return found


def text_of(ids: list[int]) -> str:
    assert ids[-1] in EOS
    assert not set(ids[:-1]) & set(range(7)), "a special token inside the text"
    return TOKENIZER.decode(ids[:-1], skip_special_tokens=False)


def test_random_logits_give_valid_json_for_320_schemas(sampler):
    asked = schemas(seed=1, count=SCHEMAS)
    for start in range(0, SCHEMAS, 40):
        block = asked[start : start + 40]
        rows = [sampler.row(schema_spec(schema, seed=start + i)) for i, schema in enumerate(block)]
        for schema, (ids, reason) in zip(block, answers(sampler, rows, start), strict=True):
            assert reason == "stop", schema
            jsonschema.validate(
                json.loads(text_of(ids)),
                schema,
                format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
            )


def test_a_resumed_answer_continues_its_grammar(sampler):
    spec = spec_of("regex", "([a-z]{3,5}-){9}end", seed=4)
    (whole, reason), *_ = answers(sampler, [sampler.row(spec)])
    assert reason == "stop"
    half = len(whole) // 2
    resumed = SamplingSpec(
        constraint=spec.constraint, max_tokens=600, stop_token_ids=EOS, resumed_tokens=half
    )
    row = sampler.row(resumed, 0, [99, 98, *whole[:half]])
    (rest, reason), *_ = answers(sampler, [row], logits_seed=8)
    assert reason == "stop"
    assert re.fullmatch("([a-z]{3,5}-){9}end", text_of(whole[:half] + rest))


def test_min_tokens_yields_to_the_end_of_the_grammar_and_bars_an_earlier_stop(sampler):
    early = sampler.row(spec_of("choice", json.dumps(["yes", "no"]), min_tokens=50))
    late = sampler.row(spec_of("regex", "[a-c]*", min_tokens=50))
    (first, reason), (second, other) = answers(sampler, [early, late])
    assert (reason, other) == ("stop", "stop")
    assert text_of(first) in ("yes", "no")
    assert len(second) > 50


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("choice", json.dumps(['a "b"\n', "", "é😀/"]), 'a "b"\n||é😀/'),
        ("grammar", 'root ::= "a" ("b" | "c"){1,9} "d"', "a[bc]{1,9}d"),
        ("grammar", 'start: "a" B\nB: /[xy]{2}z/', "a[xy]{2}z"),
        ("regex", r"[0-9]{2}/[A-Za-z_]{3}", r"[0-9]{2}/[A-Za-z_]{3}"),
    ],
)
def test_kinds(sampler, kind, text, pattern):
    rows = [sampler.row(spec_of(kind, text, seed=seed)) for seed in range(6)]
    for ids, _ in answers(sampler, rows):
        assert re.fullmatch(pattern, text_of(ids))


def test_json_object_and_structural_tags(sampler):
    closing = TOKENIZER.token_to_id("}")
    spec = spec_of("json_object", logit_bias={closing: 30.0, EOS[0]: 40.0})
    (ids, _), *_ = answers(sampler, [sampler.row(spec)])
    assert isinstance(json.loads(text_of(ids)), dict)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tag = {
        "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}],
        "triggers": ["<f"],
    }
    row = sampler.row(spec_of("structural_tag", json.dumps(tag)))
    for token_id in TOKENIZER.encode('so <f>{"n": 3}</f> and', add_special_tokens=False).ids:
        row.append(token_id)
    assert row.matcher is not None
    assert not row.matcher.error
    for token_id in TOKENIZER.encode(" <fx", add_special_tokens=False).ids:
        row.append(token_id)
    assert row.matcher.error


def test_one_bad_row_leaves_the_others_alone(sampler):
    bad, plain = sampler.row(spec_of("regex", "(a")), sampler.row(SamplingSpec(max_tokens=9))
    good = sampler.row(spec_of("choice", '["yes"]'))
    sampled = sampler.sample(torch.zeros(3, VOCAB), [bad, plain, good])
    assert "unclosed group" in sampled.errors[0]
    assert list(sampled.errors) == [0]
    assert min(sampled.token_ids[1:]) >= 0
    refused = Sampler().sample(torch.zeros(1, VOCAB), [Sampler().row(good.spec)])
    assert "can't constrain" in refused.errors[0]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("grammar", "start: start"),
        ("json_schema", '{"$ref": "#"}'),
        ("json_schema", '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'),
        ("regex", r"a[^\s\S]"),
    ],
)
def test_a_grammar_that_no_text_fits_does_not_compile(kind, text):
    grammars = Grammars(FOLDER, VOCAB, EOS)
    with pytest.raises(GrammarError, match="no text fits it"):
        grammars.prepare(Constraint(kind=kind, text=text)).result()
    grammars.close()
