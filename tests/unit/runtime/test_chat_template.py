"""Chat templates are untrusted code: compiled on first use, limited in time and memory."""

from __future__ import annotations

from time import thread_time

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, models

from specbuild.runtime.errors import EngineFileError, RequestError
from specbuild.runtime.text import chat_template, template_meter
from specbuild.runtime.text.chat_template import ChatTemplate
from specbuild.runtime.text.codec import TextCodec
from specbuild.runtime.text.template_meter import MAX_SOURCE_BYTES

USER = [{"role": "user", "content": "x"}]
TOKENIZER = Tokenizer(models.BPE({"a": 0, "b": 1}, [])).to_str().encode()
PUBLISHED = """
{%- macro text_of(content) -%}
{%- if content is string -%}{{ content | trim }}
{%- else -%}{%- for p in content if p.type == 'text' -%}{{ p['text'] ~ '!' }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{ bos_token }}
{%- if messages[0].role == 'system' -%}
  {%- set system = messages[0]['content'].strip() -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set rest = messages -%}{%- endif -%}
{{ '<<SYS>>' + system + '%s|%5.1f' % ('x', 1.25) }}
{%- set ns = namespace(last=-1, seen=[], tool=false) -%}
{%- for m in rest -%}
  {%- if m.role not in ['user', 'assistant'] -%}{{ raise_exception('no') }}{%- endif -%}
  {%- set ns.last = loop.index0 -%}{%- set ns.seen = ns.seen + [m.role] -%}
  <{{ m.role|upper }} {{ loop.index }}/{{ loop.length }}{{ ' last' if loop.last }}>
  {%- if m.content is string and '</think>' in m.content -%}
    {%- set parts = m.content.split('</think>') -%}
    {{ parts[-1].lstrip('\\n') }}|THINK {{ parts[0].split('<think>')[-1] | replace('x', 'y') }}
  {%- else -%}{{ text_of(m.content) }}{%- endif -%}
  {%- for call in m.get('calls', []) -%}{{ call | tojson }}{{ call.n * 2 - 7 // 2 }}
  {%- for k, v in call|items -%}{{ k }}={{ v }},{%- endfor -%}{%- endfor -%}
  {%- if loop.index > 9 -%}{%- break -%}{%- endif -%}
{%- endfor -%}
{{ ns.seen | join('+') }}{{ (messages | selectattr('role', 'equalto', 'user') | list | length) }}
{{ messages | map(attribute='role') | unique | list }}{{ [1, 2, 3][::-1] }}{{ {'a': (1, 2)} }}
{%- if tools is not none and tools -%}{{ tools }}{%- endif -%}
{{ '{} and {:>4}'.format('a', 3) }}{{ 'a b'.title() }}{{ range(3) | list }}{{ dict(a=1).a }}
{%- if add_generation_prompt -%}<assistant>{{ '' if ns.tool else loop_free | default('end') }}
{%- endif -%}
"""

HELD = "{% set n = namespace(x=%s) %}{% for i in range(99) %}{% set n.x = %s %}{% endfor %}"
DOUBLED = ("'a'", "n.x ~ n.x"), ("'a'", "n.x + n.x"), ("'a'", "n.x * 2"), ("[1]", "n.x + n.x")
# Equal texts that are not the same object.
BOTH = "{% set a = 'a' * 4000000 %}{% set b = 'a' * 3999999 + 'a' %}"
GREEDY = {
    "power": "{{ 10 ** (10 ** 10) }}",
    "power in a test": "{% if 10 ** (10 ** 10) > 1 %}{% endif %}",
    "long text": "{{ 'a' * 900000000 }}",
    "long text in a filter": "{{ ('a' * 900000000)|length }}",
    "long list": "{{ ([1] * 900000000)|length }}",
    "widths": "{{ 'a'|center(900000000) }}{{ 'a'.ljust(900000000) }}",
    "ljust": "{{ 'a'.ljust(900000000) }}",
    "format": "{{ '%900000000d' % 1 }}",
    "format filter": "{{ '%900000000d'|format(1) }}",
    "format method": "{{ '{:900000000}'.format(1) }}",
    "format width": "{{ '{:{}}'.format(1, 900000000) }}",
    "format map": "{{ '{a:900000000}'.format_map({'a': 1}) }}",
    "bytes": "{{ (1).to_bytes(900000000, 'big') }}",
    "encode": "{{ 'a'.encode().ljust(900000000) }}",
    "fromkeys": "{{ dict.fromkeys(range(100000)) }}",
    "indent": "{{ 'a\\na'|indent(900000000) }}",
    "indent of json": "{{ [[1]]|tojson(indent=900000000) }}",
    "replace": "{% set a = 'a' * 4000000 %}{{ a.replace('a', a) }}",
    "replace filter": "{% set a = 'a' * 4000000 %}{{ a|replace('a', a) }}",
    "join": "{% set a = 'a' * 4000000 %}{{ ([a] * 1000)|join }}",
    "join method": "{% set a = 'a' * 4000000 %}{{ ''.join([a] * 1000) }}",
    "sum": "{{ ([[1] * 1000] * 9999)|sum(start=[])|length }}",
    "nested text": HELD.replace("%s", "[1]", 1).replace("%s", "[n.x, n.x]") + "{{ n.x }}",
    "nested comparison": HELD.replace("%s", "[1]", 1).replace("%s", "[n.x, n.x]")
    + HELD.replace("n.", "m.")
    .replace("set n =", "set m =")
    .replace("%s", "[1]", 1)
    .replace("%s", "[m.x, m.x]")
    + "{{ n.x == m.x }}",
    "nested namespaces": HELD.replace("%s", "1", 1).replace("%s", "namespace(a=n.x, b=n.x)")
    + "{{ n.x }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops of filters": "{% for i in range(99999) %}{{ range(99999)|select('string')|list }}"
    "{% endfor %}",
    "loops that keep nothing": "{% for i in range(99999) %}{% for j in range(99999) if false %}"
    "{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(90) }}",
    "recursive loop": "{% for i in [1, 2] recursive %}{% if loop.depth < 90 %}{{ loop([1, 2]) }}"
    "{% endif %}{% endfor %}",
    "slices": "{% set n = namespace(x=[]) %}{% set a = 'a' * 4000000 %}"
    "{% for i in range(99999) %}{% set n.x = [n.x, a[1:]] %}{% endfor %}",
    "blocks": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set b %}{{ n.x }}{{ n.x }}"
    "{% endset %}{% set n.x = b %}{% endfor %}",
    "output": "{% set a = 'a' * 4000000 %}{% for i in range(99999) %}{{ a }}{% endfor %}",
    "escapes": "{% set a = '<' * 4000000 %}{% for i in range(99) %}{{ a|e }}{% endfor %}",
    "autoescape": "{% autoescape true %}{{ '<' * 9 }}{% endautoescape %}",
    "lorem ipsum": "{{ lipsum(n=90000) }}",
    "wordwrap": "{{ ('a ' * 999999)|wordwrap(1) }}",
    "without end": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "division of large numbers": "{% set a = ('f' * 4000000)|int(base=16) %}{{ a // 3 }}",
    "equal lists": BOTH + "{{ [a] * 60000 == [b] * 60000 }}",
    "a list of a text": BOTH + "{{ b in [a + 'b'] * 60000 }}",
    "a count": BOTH + "{{ ([a + 'b'] * 60000).count(b) }}",
    "a sort": BOTH + "{{ ([a] * 30000 + [b] * 30000)|sort|length }}",
    "a test": BOTH + "{{ ([a + 'b'] * 60000)|select('equalto', b)|list|length }}",
    "a search from the right": "{{ ('a' * 4000000).rfind('ab' + 'a' * 2000000) }}",
    "a strip": "{{ ('a' * 4000000).strip('b' * 2000000 + 'a') }}",
    "a trim": "{{ ('a' * 4000000)|trim('b' * 2000000 + 'a') }}",
    "a batch": "{{ [1]|batch(60000, 'a' * 4000000)|list|length }}",
    "a date": "{{ strftime_now('%Y' * 99999) }}",
}
GREEDY |= {
    f"doubled {i}": HELD.replace("%s", start, 1).replace("%s", step)
    for i, (start, step) in enumerate(DOUBLED)
}


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use smaller limits of the same kinds, which tests reach in less than a second."""
    monkeypatch.setattr(template_meter, "MAX_STEPS", 1 << 16)
    monkeypatch.setattr(template_meter, "MAX_SECONDS", 0.2)


@pytest.mark.usefixtures("small_bounds")
@pytest.mark.parametrize("name", GREEDY)
def test_a_greedy_template_is_stopped(name: str) -> None:
    template = ChatTemplate(GREEDY[name])
    begun = thread_time()
    with pytest.raises((RequestError, EngineFileError), match="the chat template") as stopped:
        template.render(USER, {})
    assert thread_time() - begun < 1
    assert "\n" not in str(stopped.value) and "a" * 400 not in str(stopped.value)


def test_nothing_is_compiled_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids and raw text do not use the template, whatever it contains."""
    monkeypatch.setattr(chat_template, "_environment", lambda _meter: pytest.fail("compiled"))
    codec = TextCodec(TOKENIZER, None, GREEDY["power"].encode())
    assert codec.encode("ab", raw=True, most_tokens=9) == (0, 1)


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if a %}" * 3000 + "{% endif %}" * 3000,
        "{{ " + "1 + " * 2000 + "1 }}",
        "{{ 9" + "9" * 5000 + " }}",
        "{{ a|nofilter }}",
        "{# " + "x" * MAX_SOURCE_BYTES + " #}",
    ],
    ids=["syntax", "parentheses", "blocks", "sum", "digits", "filter", "length"],
)
def test_reports_a_template_that_does_not_compile(source: str) -> None:
    codec = TextCodec(TOKENIZER, None, source.encode())
    with pytest.raises(EngineFileError, match="the chat template") as refused:
        codec.check_template()
    assert "--raw" in str(refused.value) and len(str(refused.value)) < 500
    with pytest.raises(EngineFileError, match="the chat template"):
        codec.encode("ab", raw=False, most_tokens=9)


def test_limits_do_not_change_published_templates() -> None:
    """Compare with jinja2 without limits: every kind of expression in published templates."""
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    plain.globals["raise_exception"] = pytest.fail
    messages = [
        {"role": "system", "content": " be kind\n"},
        {"role": "user", "content": [{"type": "text", "text": "é <b>"}, {"type": "image"}]},
        {"role": "assistant", "content": "<think>why</think>so", "calls": [{"a": {}, "n": 1}]},
    ]
    expected = plain.from_string(PUBLISHED).render(
        messages=messages, add_generation_prompt=True, tools=None, documents=None, bos_token="<s>"
    )
    assert "so|THINK why" in expected
    assert ChatTemplate(PUBLISHED).render(messages, {"bos_token": "<s>"}) == expected


def test_a_long_chat_is_rendered() -> None:
    messages = [{"role": "user", "content": "words of a chat " * 60}] * 1000
    template = ChatTemplate(
        "{% set ns = namespace(text='') %}{% for m in messages %}{{ '<' + m.role + '>' }}"
        "{{ m.content|trim }}{% endfor %}"
    )
    assert len(template.render(messages, {})) > 900_000
