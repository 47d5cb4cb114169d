"""Budgets of reasoning: the end is forced after exactly so many tokens, in every form."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from millrace.core.request_spec import Constraint, ReasoningBudget
from millrace.engine.sampling.sampler import Sampler, SamplingSpec, finish_reason
from millrace.grammar.matcher import Grammars
from millrace.grammar.reasoning import CLOSERS, MARKERS, OPENERS
from millrace.shipped import SHIPPED_MODEL

EOS = (1,)
FORMS = ("think", "mistral")
SPECIAL = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>")
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["n"],
    "additionalProperties": False,
}


class Model:
    """Draws answers from random logits, with a tokenizer of its own."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.vocab = self.tokenizer.get_vocab_size() + 7
        self.grammars = Grammars(folder, self.vocab, EOS)
        self.sampler = Sampler(self.grammars)

    def answer(
        self, spec: SamplingSpec, begins: str = "", resumed: list[int] | None = None, seed: int = 0
    ) -> tuple[list[int], str]:
        """Returns tokens and finish reason; the model's first tokens are those of `begins`."""
        wanted = list(self.grammars.vocabulary.ids(begins)) if begins else []
        ids = list(resumed or [])
        row = self.sampler.row(spec, 0, [0, *ids])
        reason = ""
        while not reason:
            logits = torch.randn(1, self.vocab, generator=self.generator(seed + len(ids)))
            if len(ids) < len(wanted):
                logits[0, wanted[len(ids)]] = 999.0
            sampled = self.sampler.sample(logits, [row])
            assert not sampled.errors, sampled.errors
            ids += sampled.token_ids
            row.append(ids[-1])
            reason = finish_reason(spec, len(ids) - len(resumed or []), ids[-1])
        return ids, reason

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    def text(self, ids: list[int]) -> str:
        return b"".join(map(self.grammars.vocabulary.token, ids)).decode(errors="replace")


@pytest.fixture(scope="module")
def plain():
    """A tokenizer that spells the markers with several tokens."""
    model = Model(SHIPPED_MODEL)
    yield model
    model.grammars.close()


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """A tokenizer with a token for every marker."""
    folder = tmp_path_factory.mktemp("marked")
    tokenizer = Tokenizer.from_file(str(SHIPPED_MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens([*SPECIAL, *MARKERS["mistral"]])
    tokenizer.add_tokens(list(MARKERS["think"]))
    tokenizer.save(str(folder / "tokenizer.json"))
    model = Model(folder)
    yield model
    model.grammars.close()


def spec_of(budget: int, form: str = "think", **options) -> SamplingSpec:
    where = {name: options.pop(name) for name in ("opened", "calls") if name in options}
    reasoning = ReasoningBudget(max_tokens=budget, form=form, **where)
    defaults = {"max_tokens": 80, "temperature": 1.0, "seed": 3, "stop_token_ids": EOS}
    return SamplingSpec(reasoning=reasoning, **defaults | options)


def quiet(model: Model, *, keep: tuple[str, ...] = ()) -> dict[int, float]:
    """A bias against special tokens, which random logits would draw."""
    vocabulary = model.tokenizer.get_vocab()
    special = {i for text, i in vocabulary.items() if re.fullmatch(r"[<\[].*[>\]]", text)}
    special |= set(range(model.vocab - 7, model.vocab))
    return dict.fromkeys(special - {vocabulary[text] for text in keep}, -100.0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("budget", [0, 1, 13])
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("kind", ["plain", "marked"])
def test_the_end_comes_after_exactly_so_many_tokens(request, kind, form, budget, opened):
    model = request.getfixturevalue(kind)
    start, end = MARKERS[form]
    spec = spec_of(budget, form, opened=opened, logit_bias=quiet(model))
    ids, reason = model.answer(spec, "" if opened else start)
    assert reason == "length"
    ends = model.grammars.vocabulary.ids(end)
    at = budget + (0 if opened else len(model.grammars.vocabulary.ids(start)))
    assert tuple(ids[at : at + len(ends)]) == ends
    assert model.text(ids).count(end) == 1


@pytest.mark.parametrize("kind", ["plain", "marked"])
def test_an_end_of_the_models_own_ends_the_count(request, kind):
    model = request.getfixturevalue(kind)
    written = "<th>ink</think>ok"  # the first marker comes with other tokens before it
    ids, _ = model.answer(spec_of(40, opened=True, logit_bias=quiet(model)), written)
    assert model.text(ids).count("</think>") == 1
    assert len(ids) == 80


def test_an_answer_without_reasoning_is_left_alone(marked):
    spec = spec_of(3, logit_bias=quiet(marked))
    without = replace(spec, reasoning=None)
    for begins in ("Yes", "  <thin", "\n<b><think>"):
        assert marked.answer(spec, begins) == marked.answer(without, begins)


def test_what_comes_after_the_budget_is_the_models_own(marked):
    """The forced tokens replace what the model would have said; nothing else changes."""
    spec = spec_of(9, opened=True, logit_bias=quiet(marked))
    ids, _ = marked.answer(spec)
    free, _ = marked.answer(replace(spec, reasoning=None))
    assert ids[:9] == free[:9] and ids[10:] == free[10:]


@pytest.mark.parametrize(
    ("kind", "form"),
    # Harmony's markers are tokens of every tokenizer that has the form.
    [*((kind, form) for kind in ("plain", "marked") for form in FORMS), ("marked", "harmony")],
)
def test_a_resumed_answer_continues_as_if_undisturbed(request, kind, form):
    model = request.getfixturevalue(kind)
    begins = "<|channel|>analysis<|message|>" if form == "harmony" else ""
    options = {"constraint": Constraint(kind="regex", text="[a-z]{30,40}")}
    for extra in ({}, options if kind == "marked" else {}):
        spec = spec_of(12, form, opened=True, logit_bias=quiet(model), **extra)
        whole, reason = model.answer(spec, begins)
        for cut in range(1, len(whole), 3):
            rest = replace(spec, max_tokens=80 - cut, resumed_tokens=cut)
            assert model.answer(rest, begins, whole[:cut]) == (whole, reason)


@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize("budget", [0, 4])
def test_harmony_ends_the_analysis_and_bars_a_second_one(marked, calls, budget):
    header = "<|channel|>analysis<|message|>"
    spec = spec_of(budget, "harmony", opened=True, calls=calls, logit_bias=quiet(marked))
    ids, _ = marked.answer(spec, "<|channel|>" if budget == 0 else header)
    text = marked.text(ids)
    if budget:
        assert text.startswith(header)
        size = len(marked.grammars.vocabulary.ids(header))
        text = marked.text(ids[size + budget :])
        assert text.startswith("<|end|><|start|>assistant<|channel|>")
    channel = text.split("<|channel|>")[1]
    first = (
        marked.grammars.vocabulary.ids("final")[0],
        marked.grammars.vocabulary.ids("commentary")[0],
    )
    starts = [marked.text([token]) for token in (first if calls else first[:1])]
    assert channel.startswith(tuple(starts))
    if budget and not calls:
        assert channel.startswith("final<|message|>")


def test_harmony_counts_all_messages_together(marked):
    """Two messages leave nothing of a budget of their tokens."""
    begins = 2 * "<|channel|>analysis<|message|>abc<|end|><|start|>assistant" + "<|channel|>"
    three = len(marked.grammars.vocabulary.ids("abc"))
    spec = spec_of(2 * three, "harmony", opened=True, logit_bias=quiet(marked))
    ids, _ = marked.answer(spec, begins)
    size = len(marked.grammars.vocabulary.ids(begins))
    assert ids[size] == marked.grammars.vocabulary.ids("final")[0]


@pytest.mark.parametrize("form", [*FORMS, "harmony"])
@pytest.mark.parametrize("budget", [0, 2, 25])
@pytest.mark.parametrize("ends", [True, False])
def test_a_schema_holds_after_the_reasoning(marked, form, budget, ends):
    """Stop tokens do not end the reasoning; a written marker takes no part of the answer."""
    start, end = MARKERS.get(form, ("<|channel|>analysis<|message|>", "<|end|>"))
    for seed in range(8):
        spec = spec_of(
            budget,
            form,
            opened=True,
            seed=seed,
            max_tokens=300,
            temperature=1.5,
            constraint=Constraint(kind="json_schema", text=json.dumps(SCHEMA)),
        )
        begins = (start if form == "harmony" else "") + "so</think" + ("" if ends else "x")
        ids, reason = marked.answer(spec, begins, seed=1000 * seed)
        assert reason == "stop"
        text = marked.text(ids[:-1])
        reasoning, _, answer = text.partition(end)
        if form == "harmony" and budget:
            prefix = "<|start|>assistant<|channel|>final<|message|>"
            assert reasoning.startswith(start) and answer.startswith(prefix)
            answer = answer.removeprefix(prefix)
            assert not any(m in reasoning[len(start) :] for m in (*OPENERS, *CLOSERS))
        elif form == "harmony":
            answer = text.removeprefix("<|channel|>final<|message|>")
        assert 0 <= json.loads(answer)["n"] <= 999


def test_a_constrained_answer_may_begin_with_its_reasoning_or_without(marked):
    constraint = Constraint(kind="regex", text="[0-9]{4}")
    spec = spec_of(6, constraint=constraint, max_tokens=60)
    [think] = marked.grammars.vocabulary.ids("<think>")
    with_it, _ = marked.answer(replace(spec, logit_bias={think: 99.0}))
    assert re.fullmatch(r"<think>(?s:.)*</think>[0-9]{4}<\|e.*", marked.text(with_it))
    without, _ = marked.answer(replace(spec, logit_bias={think: -99.0}))
    assert re.fullmatch(r"[0-9]{4}<\|e.*", marked.text(without))


def test_a_forced_marker_comes_whatever_else_bars_it(marked):
    ends = marked.grammars.vocabulary.ids("</think>")
    spec = spec_of(2, opened=True, allowed_token_ids=(300, 301), bad_words=(ends,), min_tokens=70)
    ids, _ = marked.answer(spec)
    assert tuple(ids[2 : 2 + len(ends)]) == ends
    assert set(ids[:2] + ids[2 + len(ends) :]) <= {300, 301}


def test_a_sampler_without_grammars_says_so():
    row = Sampler().row(spec_of(2, opened=True))
    sampled = Sampler().sample(torch.zeros(1, 50), [row])
    assert "can't constrain" in sampled.errors[0]
