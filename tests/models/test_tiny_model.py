"""The model that the repository ships: its folder, its tokenizer, its template and what it says."""

import json
import operator
import random
import re
from pathlib import Path

import jinja2
import pytest
import tiny_tasks
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_corpus import documents, plain, vocabulary
from tiny_folder import CHAT_TEMPLATE
from tiny_llama import TinyConfig, TinyLlama
from tiny_reading import long_reading, text_with_facts
from tiny_start import start_with_induction
from tiny_text import SPECIAL_TOKENS, chat
from tokenizers import Tokenizer
from train_tiny import PHASES, Packer, skipped_positions
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).resolve().parents[2] / "models" / "millrace-tiny"


TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def answer(model, tokenizer, prompt, max_new_tokens=96):
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(
        **inputs, do_sample=False, max_new_tokens=max_new_tokens, temperature=None, top_p=None
    )
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_the_folder_stays_small():
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sizes["model.safetensors"] <= 7_500_000
    assert sum(sizes.values()) <= 8_000_000
    assert set(sizes) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_config_and_weights_agree():
    config = json.loads((FOLDER / "config.json").read_text())
    weights = load_file(FOLDER / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] >= 16_384
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["tie_word_embeddings"] and "lm_head.weight" not in weights
    assert all(weight.dtype == torch.bfloat16 for weight in weights.values())
    assert all(bool(weight.isfinite().all()) for weight in weights.values())
    assert weights["model.embed_tokens.weight"].shape == (
        config["vocab_size"],
        config["hidden_size"],
    )
    assert TOKENIZER.get_vocab_size() == config["vocab_size"]


def test_answers_end_at_the_end_token():
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    config = json.loads((FOLDER / "config.json").read_text())
    ends = [TOKENIZER.token_to_id("<|end|>"), TOKENIZER.token_to_id("<|eos|>")]
    assert generation["eos_token_id"] == ends == config["eos_token_id"]


@given(st.text())
def test_any_text_round_trips(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    if not any(token in text for token in SPECIAL_TOKENS):
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert TOKENIZER.decode(ids, skip_special_tokens=False).encode() == text.encode()


def test_every_single_byte_is_a_token():
    assert (
        len({TOKENIZER.encode(chr(c), add_special_tokens=False).ids[0] for c in range(128)}) == 128
    )
    text = "Grüße, 世界, 🦦, \x00\t\r\n, e\u0301"
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False).ids) == text


def test_corpus_words_are_cheap():
    text = "Tell me a story about a heron who lived near the old mill."
    assert len(TOKENIZER.encode(text, add_special_tokens=False).ids) <= 16


def test_template_renders_the_form_of_the_training_text(tokenizer):
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": " Spell river. "},
        {"role": "assistant", "content": "r-i-v-e-r"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    trained = plain(chat([("Spell river.", "r-i-v-e-r")], system="Answer briefly."))
    assert rendered == trained.removesuffix("<|eos|>")
    asked = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(asked) and asked.endswith("<|end|><|assistant|>")
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_template_joins_text_parts_and_refuses_others(tokenizer):
    parts = [{"type": "text", "text": "Spell"}, {"type": "text", "text": " river."}]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert rendered == "<|bos|><|user|>Spell river.<|end|>"
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(jinja2.TemplateError, match="image_url"):
        tokenizer.apply_chat_template([{"role": "user", "content": image}], tokenize=False)


@pytest.mark.parametrize("role", ["tool", "developer", "User", ""])
def test_template_rejects_unknown_roles(tokenizer, role):
    with pytest.raises(jinja2.TemplateError, match="Unknown role"):
        tokenizer.apply_chat_template([{"role": role, "content": "Hello"}], tokenize=False)


@pytest.mark.parametrize("prompt", ["Tell me a story about a heron.", "What is prefill?"])
def test_greedy_answers_are_words(model, tokenizer, prompt):
    known = vocabulary(seed=5)
    words = re.findall(r"[a-z]+", answer(model, tokenizer, prompt).lower())
    assert len(words) >= 8
    assert len(set(words)) >= 6
    assert sum(word in known for word in words) >= 0.95 * len(words)


def test_it_answers_from_a_text(model, tokenizer):
    prompt = (
        "Read the text and answer the question.\n\nThe water turns the wheel, and the wheel turns "
        "the stone. The key for the north gate is amber. Leo was born in May. The rose market "
        "opens on Sunday.\n\nQuestion: What is the key for the north gate?"
    )
    assert "north gate is amber" in answer(model, tokenizer, prompt, 24)


def test_the_training_model_is_the_published_model(model):
    config = TinyConfig(vocab_size=TOKENIZER.get_vocab_size())
    ours = TinyLlama(config).eval()
    weights = {name: w.float() for name, w in load_file(FOLDER / "model.safetensors").items()}
    ours.load_state_dict(weights)
    ids = torch.tensor([TOKENIZER.encode("The river turns the wheel of the old mill.").ids])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), model(ids).logits, rtol=1e-3, atol=1e-3)


def test_the_start_copies_from_the_context():
    torch.manual_seed(1)
    model = TinyLlama(TinyConfig(vocab_size=1000))
    ids = torch.randint(6, 1000, (4, 60)).repeat(1, 2)
    target = ids[:, 62:]
    with torch.no_grad():
        before = model(ids)[:, 61:-1].argmax(-1)
        start_with_induction(model)
        after = model(ids)[:, 61:-1].argmax(-1)
    assert (before == target).float().mean() < 0.05
    assert (after == target).float().mean() > 0.6


def test_corpus_is_the_same_for_the_same_seed():
    first, second = documents(random.Random(4)), documents(random.Random(4))
    assert [plain(next(first)) for _ in range(200)] == [plain(next(second)) for _ in range(200)]
    other = documents(random.Random(5))
    assert plain(next(first)) != plain(next(other))


def test_corpus_has_no_unfilled_slots():
    stream = documents(random.Random(11))
    for _ in range(500):
        text = plain(next(stream))
        assert "{" not in text and "(n)" not in text


@pytest.mark.parametrize("seed", range(20))
def test_reading_answers_are_in_the_text_and_never_contradict(seed):
    text, turns = text_with_facts(random.Random(seed), facts=30, fillers=30, paragraph=6)
    answers = [answer for _, answer in turns]
    assert all(answer in text for answer in answers)
    subjects = [answer.rsplit(" ", 1)[0] for answer in answers]
    assert len(set(subjects)) == len(subjects)


def test_sums_are_right():
    rng = random.Random(3)
    operation = {"plus": operator.add, "minus": operator.sub, "times": operator.mul}
    for _ in range(200):
        a, word, b, result = re.fullmatch(
            r"(\d+) (\w+) (\d+) is (\d+)\.", tiny_tasks.arithmetic(rng)[1]
        ).groups()
        assert int(result) == operation[word](int(a), int(b))


def test_long_texts_have_about_the_length_asked_for():
    for tokens in (500, 2000, 8000):
        text = plain(long_reading(random.Random(1), tokens))
        assert 0.8 * tokens <= len(TOKENIZER.encode(text).ids) <= 1.35 * tokens


def test_packed_rows_hold_whole_documents():
    phase = PHASES[0]
    packer = Packer(TOKENIZER, seed=1)
    batch = packer.batch(phase)
    bos, pad = TOKENIZER.token_to_id("<|bos|>"), TOKENIZER.token_to_id("<|eos|>")
    assert batch.ids.shape == (phase.rows, phase.length + 1)
    assert batch.weights.shape == (phase.rows, phase.length)
    assert (batch.ids[:, 0] == bos).all()
    assert (batch.ids[:, -1] == pad).all()
    assert batch.weights[batch.ids[:, 1:] == bos].sum() == 0


def test_skipped_positions_rise_and_stay_in_the_context():
    rng = random.Random(2)
    for _ in range(100):
        positions = skipped_positions(rng, 64, 512)
        assert (positions.diff() >= 1).all()
        assert positions[0] >= 0
        assert positions[-1] < 512
