"""Parsers of each model family, against recorded texts, in one piece and in every kind of split."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.proxy.parsing.events import Arguments, CallStarted, Content, Reasoning
from millrace.proxy.parsing.families import Parsers, choose_parsers
from millrace.proxy.parsing.json_calls import DEEPSEEK_TOKENS, MOST_HELD

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "now": {"type": "object", "properties": {}},
    "save": {"type": "object", "properties": {"note": {"type": "object"}}},
}
OSLO = ("get_weather", {"city": "Oslo", "days": 3})
ROME = ("get_weather", {"city": "Rome"})
NOW = ("now", {})
DEEP = ("save", {"note": {"tags": ["a", {"b": None}], "done": False, "size": 1.5}})
ODD = ("get_weather", {"city": 'São "Paulo" 東京 {x} [y] \\ </a>\n🙂'})

CASES = {
    "simple": [OSLO],
    "parallel": [OSLO, ROME],
    "multiple": [ROME, NOW, DEEP],
    "nested": [DEEP],
    "quotes and unicode": [ODD],
    "empty arguments": [NOW],
}


def dumps(value):
    return json.dumps(value, ensure_ascii=False)


def llama(calls):
    texts = [dumps({"name": name, "parameters": arguments}) for name, arguments in calls]
    return "; ".join(texts)


def pythonic(calls):
    texts = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    return f"[{', '.join(texts)}]"


def hermes(calls):
    texts = [dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def qwen3_coder(calls):
    def text(value):
        return value if isinstance(value, str) else dumps(value)

    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{text(v)}\n</parameter>\n" for k, v in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def mistral_array(calls):
    return "[TOOL_CALLS]" + dumps([{"name": n, "arguments": a} for n, a in calls])


def mistral_named(calls):
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{dumps(a)}" for n, a in calls)


CALLS, CALL, SEP, CALL_END, CALLS_END = DEEPSEEK_TOKENS


def deepseek_v3(calls):
    texts = [f"{CALL}function{SEP}{n}\n```json\n{dumps(a)}\n```{CALL_END}" for n, a in calls]
    return CALLS + "\n".join(texts) + CALLS_END


def deepseek_v31(calls):
    return CALLS + "".join(f"{CALL}{n}{SEP}{dumps(a)}{CALL_END}" for n, a in calls) + CALLS_END


def harmony(calls):
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dumps(a)}<|call|>"
        for n, a in calls
    )


FORMS = {
    "llama3_json": ("llama3_json", llama),
    "llama3_json tag": ("llama3_json", lambda calls: "<|python_tag|>" + llama(calls)),
    "pythonic": ("pythonic", pythonic),
    "pythonic marked": ("pythonic", lambda c: f"<|python_start|>{pythonic(c)}<|python_end|>"),
    "hermes": ("hermes", hermes),
    "qwen3_coder": ("qwen3_coder", qwen3_coder),
    "mistral array": ("mistral", mistral_array),
    "mistral named": ("mistral", mistral_named),
    "deepseek v3": ("deepseek", deepseek_v3),
    "deepseek v3.1": ("deepseek", deepseek_v31),
    "harmony": ("harmony", harmony),
}
FAMILIES = sorted({family for family, _ in FORMS.values()})


def run(parser, pieces):
    """Returns content, reasoning, and the calls as (name, text of arguments)."""
    content, reasoning, calls = "", "", []
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, CallStarted):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        else:
            assert isinstance(event, Arguments) and event.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return content, reasoning, calls


def parse(family, text, pieces=None, *, reasoning="none", prompt_end="", schemas=SCHEMAS):
    parser = Parsers(tools=family, reasoning=reasoning).make(schemas, prompt_end)
    return run(parser, [text] if pieces is None else pieces)


def read(calls):
    return [(name, json.loads(arguments)) for name, arguments in calls]


def split(text, seed):
    draw = random.Random(seed)
    pieces = []
    while text:
        size = draw.choice((1, 1, 2, 3, 7, 40))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_calls_of_a_family(form, case):
    family, write = FORMS[form]
    text = write(CASES[case])
    whole = parse(family, text)
    content, reasoning, calls = whole
    assert (content, reasoning, read(calls)) == ("", "", CASES[case])
    assert parse(family, text, list(text)) == whole
    for seed in range(5):
        assert parse(family, text, split(text, seed)) == whole


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "mistral array", "deepseek v3"])
def test_text_before_and_after_calls_is_content(form):
    family, write = FORMS[form]
    text = f"Let me look.\n{write([OSLO])}\nThat is all."
    content, _, calls = parse(family, text)
    assert (content, read(calls)) == ("Let me look.\n\nThat is all.", [OSLO])
    assert parse(family, text, list(text)) == (content, "", calls)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "text",
    [
        "It is sunny in Oslo.",
        "  Use a <tag>, [a list](link), {braces} or a < b.\n",
        '{"city": "Oslo", "days": 3}',
        "[1, 2, 3]",
        "[f(x) for x in y]",
        "[get_weather]",
        "<tool",
        "\n",
    ],
)
def test_text_without_calls_comes_back_unchanged(family, text):
    wanted = ("" if family == "harmony" and not text.strip() else text, "", [])
    assert parse(family, text) == wanted
    assert parse(family, text, list(text)) == wanted


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "<tool_call>{broken}</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {"city": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": 3}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now"'),
        ("hermes", "<tool_call>no call</tool_call> and more"),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("llama3_json", '{"name": "unknown", "parameters": {}}'),
        ("llama3_json", '<|python_tag|>print("hello")'),
        ("pythonic", "[get_weather(city=open('x'))]"),
        ("pythonic", "[get_weather('Oslo')]"),
        ("pythonic", "[unknown(a=1)]"),
        ("pythonic", "[get_weather(city='Os"),
        ("pythonic", "[get_weather(city=1e999)]"),
        ("pythonic", "[get_weather(city='\\ud800')]"),
        ("pythonic", "[get_weather(city=" + "(" * 300 + ")" * 300 + ")]"),
        ("qwen3_coder", "<tool_call>\n<function=now>\nnonsense\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=now>\n<parameter=a>"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS] none of them"),
        ("deepseek", f"{CALLS}{CALL}function{SEP}"),
    ],
)
def test_malformed_calls_are_content(family, text):
    wanted = (text, "", [])
    assert parse(family, text) == wanted
    assert parse(family, text, list(text)) == wanted


def test_call_that_breaks_after_its_arguments_began():
    text = '<tool_call>{"name": "now", "arguments": {"a": 1, b}}</tool_call>'
    whole = parse("hermes", text)
    assert whole == ("b}}</tool_call>", "", [("now", '{"a": 1, ')])
    assert parse("hermes", text, list(text)) == whole


def test_call_that_the_end_cuts_off_keeps_its_beginning():
    content, _, calls = parse("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b')
    assert (content, calls) == ("", [("now", '{"a": "b')])


def test_arguments_stream_while_the_call_is_written():
    parser = Parsers(tools="hermes").make(SCHEMAS, "")
    begun = parser.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "O')
    assert begun == [CallStarted(0, "get_weather"), Arguments(0, '{"city": "O')]
    assert parser.feed("sl") == [Arguments(0, "sl")]


@pytest.mark.parametrize(
    "text",
    [
        '{"arguments": {"city": "Rome"}, "name": "get_weather"}',
        '{"id": 7, "type": "function", "name": "get_weather", "arguments": {"city": "Rome"}}',
        '{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\"}"}',
    ],
)
def test_keys_in_any_order_and_arguments_as_text(text):
    content, _, calls = parse("hermes", f"<tool_call>{text}</tool_call>")
    assert (content, read(calls)) == ("", [ROME])


@pytest.mark.parametrize("value", ["null", None])
def test_arguments_may_be_absent(value):
    rest = "" if value is None else f', "arguments": {value}'
    assert parse("hermes", f'<tool_call>{{"name": "now"{rest}}}</tool_call>')[2] == [("now", "{}")]


def test_call_without_end_is_held_within_bounds():
    parser = Parsers(tools="hermes").make(SCHEMAS, "")
    shown = "".join(e.text for e in parser.feed('<tool_call>{"arguments": {"a": "'))
    for _ in range(2 * MOST_HELD // 4096):
        shown += "".join(event.text for event in parser.feed("x" * 4096))
    assert len(shown) > MOST_HELD
    shown += "".join(event.text for event in parser.finish())
    assert shown == '<tool_call>{"arguments": {"a": "' + "x" * (2 * MOST_HELD // 4096 * 4096)


@pytest.mark.parametrize("value", ["3", "Oslo", "true", "[1, 2]", "1e999", "NaN", "\n\n"])
def test_xml_values_follow_the_schema(value):
    text = f"<function=get_weather><parameter=city>{value}</parameter></function>"
    [(_, arguments)] = parse("qwen3_coder", text)[2]
    assert json.loads(arguments)["city"] == ("" if value == "\n\n" else value)
    [(_, arguments)] = parse("qwen3_coder", text.replace("city", "days"))[2]
    wanted = {"3": 3, "true": True, "[1, 2]": [1, 2], "\n\n": ""}
    assert json.loads(arguments)["days"] == wanted.get(value, value)


def test_reasoning_comes_before_calls():
    text = f"<think>\nWhich city? <tool_call>\n</think>\n\n{hermes([OSLO])}"
    for pieces in ([text], list(text)):
        content, reasoning, calls = parse("hermes", text, pieces, reasoning="think")
        assert (content, reasoning) == ("", "Which city? <tool_call>\n")
        assert read(calls) == [OSLO]


@pytest.mark.parametrize(
    ("prompt_end", "text", "content", "reasoning"),
    [
        ("<think>\n", "so</think>\n\nyes", "yes", "so"),
        ("<think>\n", "<think>so</think>yes", "yes", "so"),
        ("<think>\n", "never ends", "", "never ends"),
        ("<think>\n\n</think>\n\n", "yes", "yes", ""),
        ("", "yes", "yes", ""),
        ("", " <think>so</think> yes <think>", "yes <think>", "so"),
        ("", "<thin", "<thin", ""),
        ("", " " * 600 + "<think>a", " " * 600 + "<think>a", ""),
    ],
)
def test_reasoning_between_markers(prompt_end, text, content, reasoning):
    for pieces in ([text], list(text)):
        parser = Parsers(reasoning="think").make(None, prompt_end)
        assert run(parser, pieces) == (content, reasoning, [])


def test_harmony_channels():
    text = (
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Rome"}<|call|><|start|>assistant<|channel|>final<|message|>Done.<|return|>'
    )
    for pieces in ([text], list(text)):
        content, reasoning, calls = parse("harmony", text, pieces)
        assert (content, reasoning) == ("One moment.Done.", "Need the weather.")
        assert read(calls) == [ROME]
    content, _, calls = parse("harmony", text, schemas=None)
    assert calls == [] and '{"city": "Rome"}' in content


def test_harmony_with_the_recipient_before_the_channel():
    text = "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}"
    assert parse("harmony", text)[2] == [("now", "{}")]


def test_forced_calls():
    text = '[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {"a": 1}}]'
    for pieces in ([text], list(text)):
        parser = Parsers(tools="hermes", reasoning="think").make(
            SCHEMAS, "<think>", forced=True, reasons=False
        )
        assert run(parser, pieces) == ("", "", [("now", "{}"), ("now", '{"a": 1}')])


def test_forced_calls_that_are_cut_leave_no_json_as_content():
    """`max_tokens` may end the answer anywhere, before the first call's name too."""
    text = "[ \n" + ",\n".join(dumps({"name": n, "arguments": a}) for n, a in (OSLO, NOW)) + " ]"
    parsers = Parsers(tools="hermes", reasoning="none")
    for size in range(len(text) + 1):
        content, _, calls = run(parsers.make(SCHEMAS, "", forced=True), [text[:size]])
        assert content == ""
        assert [name for name, _ in calls] == ["get_weather", "now"][: len(calls)]
    assert read(calls) == [OSLO, NOW]


PIECES = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "now"),
    *(
        "</think>",
        "<function=now>",
        "</function>",
        "<parameter=a>",
        "</parameter>",
        *DEEPSEEK_TOKENS,
    ),
    *(
        "<|channel|>",
        "final",
        "analysis",
        " to=functions.now",
        "<|message|>",
        "<|call|>",
        "<|end|>",
    ),
    *('{"name": "now", ', '"arguments": {', '"a": ', '"x\\', "1", "null", "}", "]", "[", "(", ")"),
    *(",", ";", " ", "\n", "```", "<", "{", '"', "=", "'", "<|start|>", "\\u00", "[now(a=1)]"),
]


@given(st.lists(st.sampled_from(PIECES), max_size=14), st.sampled_from(FAMILIES), st.integers())
@settings(max_examples=600, deadline=None)
def test_any_split_gives_the_same_events(pieces, family, seed):
    text = "".join(pieces)
    reasoning = "none" if family == "harmony" else "think"
    whole = parse(family, text, reasoning=reasoning)
    assert parse(family, text, split(text, seed), reasoning=reasoning) == whole
    assert parse(family, text, list(text), reasoning=reasoning) == whole


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ tools }}<tool_call>", "hermes", "none"),
        ("{{ tools }}<tool_call><think>", "hermes", "think"),
        ("{{ tools }}<tool_call><function=a><parameter=b>", "qwen3_coder", "none"),
        ("{{ tools }}[TOOL_CALLS]", "mistral", "none"),
        ("{{ tools }}[TOOL_CALLS][THINK]", "mistral", "mistral"),
        (f"{{{{ tools }}}}{CALLS}</think>", "deepseek", "think"),
        ("{{ tools }}<|python_tag|>", "llama3_json", "none"),
        ("{{ tools }}<|python_start|><|python_tag|>", "pythonic", "none"),
        ("{{ tools }}<|channel|>", "harmony", "harmony"),
        ("<tool_call>", "none", "none"),
        (None, "none", "none"),
    ],
)
def test_parsers_follow_the_template(template, tools, reasoning):
    chosen = choose_parsers(template)
    assert (chosen.tools, chosen.reasoning) == (tools, reasoning)
    chosen = choose_parsers(template, tools="hermes", reasoning="none")
    assert (chosen.tools, chosen.reasoning) == ("hermes", "none")
