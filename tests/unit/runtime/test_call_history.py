"""Tool calls of earlier messages are rendered in the form that each template expects."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from specbuild.runtime.errors import RequestError
from specbuild.runtime.serve.messages import template_messages
from specbuild.runtime.text.chat_template import ChatTemplate
from specbuild.runtime.text.codec import TextCodec

# With the constructs of Qwen3's template: it looks into the content, which has to be a text.
LOOKS_INTO_CONTENT = """{% for m in messages %}[{{ m.role }}]
{%- if m.role == 'assistant' and '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}
{%- else %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.name }}
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif %}{% endfor %}{% endfor %}"""
# Of DeepSeek-V3's: calls only where the content is null, and arguments added to a text.
CALLS_WITHOUT_CONTENT = """{% for m in messages %}
{%- if m['role'] == 'assistant' and m['content'] is none %}{% for call in m['tool_calls'] %}
{{- '<call>' + call['function']['name'] + call['function']['arguments'] }}{% endfor %}
{%- else %}{{ '[' + m['role'] + ']' + m['content'] }}{% endif %}{% endfor %}"""
# Of DeepSeek-V3.1's: text and calls, arguments as a text.
ARGUMENTS_AS_TEXT = """{% for m in messages %}{{ '[' + m['role'] + ']' + (m['content'] or '') }}
{%- for call in m['tool_calls'] or [] %}
{{- '<call>' + call['function']['name'] + call['function']['arguments'] }}{% endfor %}
{%- endfor %}"""
# Renders any value: an object would appear in Python's notation.
SHOWS_ARGUMENTS = """{% for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.name }}{{ call.function.arguments }}
{%- endfor %}{% endfor %}"""
# Of GLM's and Qwen3-Coder's: arguments one by one.
WALKS_THROUGH_ARGUMENTS = """{% for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.name }}{
{%- for key, value in call.function.arguments.items() %}"{{ key }}": {{ value | tojson }}
{%- endfor %}}{% endfor %}{% endfor %}"""
NO_CALLS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
REFUSES_TOOLS = """{% for m in messages %}{% if m.tool_calls %}
{{- raise_exception('tools are not for this model') }}{% endif %}[{{ m.role }}]{{ m.content }}
{%- endfor %}"""
TEMPLATES = [
    LOOKS_INTO_CONTENT,
    CALLS_WITHOUT_CONTENT,
    ARGUMENTS_AS_TEXT,
    SHOWS_ARGUMENTS,
    WALKS_THROUGH_ARGUMENTS,
]
ARGUMENTS = '{"city": "Malmö"}'


def history(content: str | None, arguments: Any = ARGUMENTS) -> list[dict[str, Any]]:
    function = {"name": "get_weather", "arguments": arguments}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return [
        {"role": "user", "content": "w?"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "assistant", "content": None},
    ]


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    made = ChatTemplate(template)
    return made.render(made.fitted(template_messages(messages), {}), {})


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("content", [None, "", "\n\n"])
@pytest.mark.parametrize("arguments", [ARGUMENTS, json.loads(ARGUMENTS)])
def test_a_call_reaches_the_prompt(template: str, content: str | None, arguments: Any) -> None:
    prompt = rendered(template, history(content, arguments))
    assert f"<call>get_weather{ARGUMENTS}" in prompt
    assert "None" not in prompt


@pytest.mark.parametrize("template", [t for t in TEMPLATES if t != CALLS_WITHOUT_CONTENT])
def test_a_call_next_to_text_is_in_the_prompt(template: str) -> None:
    prompt = rendered(template, history("I look."))
    assert f"I look.<call>get_weather{ARGUMENTS}" in prompt


def test_rejects_a_call_that_the_template_omits() -> None:
    with pytest.raises(RequestError, match="message 1 has tool_calls beside its content"):
        rendered(CALLS_WITHOUT_CONTENT, history("I look."))
    for content in (None, "I look."):
        with pytest.raises(RequestError, match="message 1 has tool_calls, which the chat template"):
            rendered(NO_CALLS, history(content))
    assert rendered(NO_CALLS, history("x")[:1]) == "[user]w?"
    # A template that refuses such chats has its own message.
    with pytest.raises(RequestError, match="tools are not for this model"):
        rendered(REFUSES_TOOLS, history(None))


def test_arguments_that_are_no_json_stay_the_words_of_the_model() -> None:
    assert "get_weather{oops" in rendered(LOOKS_INTO_CONTENT, history(None, "{oops"))
    assert "get_weather{oops" in rendered(ARGUMENTS_AS_TEXT, history(None, "{oops"))


@pytest.mark.parametrize("variable", ["QWEN3_TOKENIZER", "DEEPSEEK_TOKENIZER"])
def test_published_templates_show_calls(variable: str) -> None:
    if variable not in os.environ:
        pytest.skip(f"{variable} names no folder with a published tokenizer_config.json")
    folder = Path(os.environ[variable])
    config = (folder / "tokenizer_config.json").read_bytes()
    codec = TextCodec((folder / "tokenizer.json").read_bytes(), config, None)
    for content in (None, "", "\n\n"):
        prompt = codec.render(template_messages(history(content)))
        assert "get_weather" in prompt and ARGUMENTS in prompt
