"""Models with trained and with random weights answer 300 JSON schemas: all answers are valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from millrace.core.request_spec import Constraint
from millrace.engine.decode_batch import DecodeBatch, Sequence
from millrace.engine.sampling.sampler import Sampler, SamplingSpec, finish_reason
from millrace.grammar.matcher import Grammars
from millrace.shipped import SHIPPED_MODEL
from support.json_schemas import schemas
from support.served_model import served_folder
from support.tiny_engine import Request, make_runner, prefill

MOST_TOKENS = 1200
AT_ONCE = 25
#: No white space: models like it.
COMPACT = {"whitespace_flexible": False, "whitespace_pattern": None}
#: Folder and end-of-sequence tokens.
MODELS = {"toy": (lambda: SHIPPED_MODEL, (5, 1)), "random": (lambda: served_folder("qwen3"), (2,))}
SCHEMAS = schemas(seed=7, count=300)


class Model:
    """Generates with one model of this process."""

    def __init__(self, folder: Path, eos: tuple[int, ...]) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.runner = make_runner(folder, num_pages=AT_ONCE * (MOST_TOKENS // 16 + 2))
        vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
        self.grammars = Grammars(folder, vocab, eos)
        self.eos = eos

    def answers(self, asked: list[dict[str, Any]], seed: int) -> list[str]:
        """Returns a complete answer for each schema, generated in one batch."""
        sampler = Sampler(self.grammars)
        batch = DecodeBatch(self.runner, self.runner.pool, sampler, max_batch=len(asked))
        prompt = self.tokenizer.encode("The mill", add_special_tokens=False).ids
        found: dict[str, list[int]] = {}
        held = []
        for number, schema in enumerate(asked):
            schema = {**schema, "x-guidance": COMPACT}
            spec = SamplingSpec(
                max_tokens=MOST_TOKENS,
                temperature=1.0,
                frequency_penalty=1.0,  # a number may have any number of digits
                seed=seed + number,
                stop_token_ids=self.eos,
                constraint=Constraint(kind="json_schema", text=json.dumps(schema)),
            )
            request = Request(self.runner, prompt, room=MOST_TOKENS)
            held.append(request.pages)
            row = sampler.row(spec, 0, prompt)
            first = sampler.sample(prefill(self.runner, request)[None], [row])
            assert not first.errors
            [token_id] = first.token_ids
            found[str(number)] = [token_id]
            if finish_reason(spec, 1, token_id):
                continue
            batch.add(
                Sequence(
                    request_id=str(number),
                    choice=0,
                    pages=request.pages,
                    prompt_tokens=len(prompt),
                    first_token_id=token_id,
                    spec=spec,
                    prompt_ids=prompt,
                )
            )
        while batch.size:
            for out in batch.step():
                assert not out.error and out.finish_reason in ("", "stop"), (out, asked)
                found[out.request_id].append(out.token_id)
        for pages in held:
            self.runner.pool.free(pages)
        return [self.tokenizer.decode(ids[:-1]) for ids in found.values()]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    folder, eos = MODELS[request.param]
    made = Model(folder(), eos)
    yield made
    made.grammars.close()


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.slow] if first >= AT_ONCE else [])
        for first in range(0, len(SCHEMAS), AT_ONCE)
    ],
)
def test_every_answer_is_valid(model, first):
    torch.manual_seed(first)
    asked = SCHEMAS[first : first + AT_ONCE]
    for schema, text in zip(asked, model.answers(asked, seed=first), strict=True):
        jsonschema.validate(
            json.loads(text),
            schema,
            format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
        )
