"""Chat templates render as with Hugging Face, in a sandbox; their errors are bad requests."""

from __future__ import annotations

import threading

import pytest

from millrace.core.errors import ModelError
from millrace.proxy.errors import ApiError
from millrace.proxy.text import chat_template
from millrace.proxy.text.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source, messages=None, **keywords):
    messages = messages or [{"role": "user", "content": "hi"}]
    keywords.setdefault("add_generation_prompt", True)
    return ChatTemplate(source, SPECIAL).render(messages, **keywords)


def test_blocks_are_trimmed_and_special_tokens_known():
    source = (
        "{{ bos_token }}\n{% for m in messages %}\n  {% if true %}\n[{{ m.role }}]{{ m.content }}\n"
        "  {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}\n>{% endif %}"
    )
    assert render(source) == "<s>\n[user]hi\n>"
    assert render(source, add_generation_prompt=False) == "<s>\n[user]hi\n"


def test_helpers_of_hugging_face():
    assert render("{{ {'a': 'é<'} | tojson }}") == '{"a": "é<"}'
    assert render("{{ {'a': 1} | tojson(indent=1) }}") == '{\n "a": 1\n}'
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render(
        "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert render("{{ tools is none }}{{ thinking }}", arguments={"thinking": 7}) == "True7"


@pytest.mark.parametrize("inline", [0, 1000])
@pytest.mark.parametrize("content", ["hi", [{"type": "text", "text": "hi"}], None])
async def test_long_messages_are_rendered_on_a_thread(monkeypatch, inline, content):
    monkeypatch.setattr(chat_template, "INLINE_CHARACTERS", inline)
    threads = []
    template = ChatTemplate("{{ note() }}{{ messages[0].content }}{{ thinking }}", SPECIAL)
    arguments = {"thinking": 7, "note": lambda: threads.append(threading.current_thread()) or ""}
    messages = [{"role": "user", "content": content}]
    options = {"add_generation_prompt": True, "arguments": arguments}
    text = await template.render_async(messages, **options)
    assert text == template.render(messages, **options) == f"{content}7"
    on_thread = bool(content) and not inline
    assert (threads[0] is not threading.main_thread()) == on_thread


async def test_failures_on_a_thread_are_bad_requests(monkeypatch):
    monkeypatch.setattr(chat_template, "INLINE_CHARACTERS", 0)
    template = ChatTemplate("{{ raise_exception('no such role') }}", SPECIAL)
    with pytest.raises(ApiError, match="no such role"):
        messages = [{"role": "user", "content": "hi"}]
        await template.render_async(messages, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.missing.deeper }}", "can't render"),
        ("{{ 1 / 0 }}", "can't render"),
        ("{{ ''.__class__.__mro__ }}", "can't render"),
        ("{{ messages.append(1) }}", "can't render"),
    ],
)
def test_failures_are_bad_requests(source, says):
    with pytest.raises(ApiError, match=says) as raised:
        render(source)
    assert (raised.value.status, raised.value.param) == (400, "messages")


def test_damaged_template_is_a_model_error():
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate("{% if %}", SPECIAL)


def test_developer_is_system_where_the_template_does_not_know_it():
    messages = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{# developer #}{{ messages[0].role }}", messages) == "developer"


def test_tool_arguments_are_objects_to_templates():
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert render("{{ messages[0].tool_calls[0].function.arguments.x }}", messages) == "1"


def test_final_message_is_continued():
    source = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Once "}]
    keywords = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(source, messages, **keywords) == "[a][Once "
    with pytest.raises(ApiError) as raised:
        render("nothing", messages, **keywords)
    assert raised.value.param == "continue_final_message"
