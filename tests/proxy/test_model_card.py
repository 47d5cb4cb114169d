"""The facts that the proxy reads from a model folder."""

from __future__ import annotations

import json

import pytest

from millrace.bench.gateway.stub_model import write_stub_model
from millrace.core.errors import ModelError
from millrace.proxy.model_card import read_model_card


def test_reads_the_small_files(tmp_path):
    write_stub_model(tmp_path, context_tokens=777)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, 4], "temperature": 0.6, "top_k": 20, "do_sample": True})
    )
    card = read_model_card(tmp_path)
    assert (card.context_tokens, card.eos_token_ids) == (777, (1, 4))
    assert (card.defaults.temperature, card.defaults.top_k, card.defaults.top_p) == (0.6, 20, 1.0)
    assert card.special_tokens["bos_token"] == "<|bos|>"
    assert "add_generation_prompt" in (card.chat_template or "")
    assert read_model_card(tmp_path, 100).context_tokens == 100


def test_template_file_goes_first(tmp_path):
    write_stub_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert read_model_card(tmp_path).chat_template == "from the file"


def test_named_templates_have_a_default(tmp_path):
    write_stub_model(tmp_path)
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_model_card(tmp_path).chat_template == "d"


@pytest.mark.parametrize("content", ["{", "[]", '{"hidden_size": 1}', '{"vocab_size": "many"}'])
def test_damaged_config_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_model_card(tmp_path)


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        read_model_card(tmp_path / "nowhere")
