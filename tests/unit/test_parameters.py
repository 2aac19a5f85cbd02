"""Request parameters are declared once: every interface has exactly the declared ones."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from specbuild.builder.checkpoint.generation import GGUF_KEYS
from specbuild.builder.op_graphs import choose_graph
from specbuild.cli.dynamo.requests import params_of
from specbuild.cli.options.generation import OutputOptions, PromptOptions, SamplingOptions
from specbuild.cli.terminal.prompt_line import prompt_of
from specbuild.plugins_cuda.choose.op import OP
from specbuild.runtime.engine_dir.generation_defaults import GenerationDefaults
from specbuild.runtime.errors import RequestError, SpecbuildError
from specbuild.runtime.generate_params import GenerateParams
from specbuild.runtime.parameters import DeclaredParameter, declared_parameters
from specbuild.runtime.sampling import CHOOSE_INPUTS, SamplingParams
from specbuild.runtime.serve.chat_choice import ChatFields
from specbuild.runtime.serve.completions import CompletionFields
from specbuild.runtime.serve.responses.fields import ResponseFields

ROOT = Path(__file__).parents[2]
SAMPLING = declared_parameters(SamplingParams)
ALL = SAMPLING | declared_parameters(GenerateParams)
BODIES: dict[type, dict[str, Any]] = {
    CompletionFields: {"prompt": "a"},
    ChatFields: {"messages": [{"role": "user", "content": "a"}]},
    ResponseFields: {"input": "a"},
}
# A value of each parameter in JSON, different from its default.
VALUES: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.25, "top_k": 3, "seed": 7, "min_p": 0.125,
    "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5,
    "logit_bias": {"5": -1.0}, "max_new_tokens": 9, "stop": ["x"], "stop_token_ids": [4],
    "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
    "min_tokens": 2, "top_logprobs": 2, "raw": True, "specpv_retrieval_blocks": 2,
    "dsa_top_k": 2, "exact": True, "cache_salt": "s", "guide": {"regex": "a+"},
    "allowed_token_ids": [4], "bad_words": ["x"],
}  # fmt: skip
NUMBERS = [entry for entry in ALL.values() if entry.range is not None]


def outside(entry: DeclaredParameter) -> float:
    """Return a number just below a parameter's range that is not a special value."""
    assert entry.range is not None
    low = entry.range.minimum
    if entry.range.allows_zero or not entry.range.excludes_minimum:
        low = min(low, 0)
        return low - (2 if entry.type is int else 0.5)
    return low


def api_value(body: type, name: str) -> Any:
    """Return the parameter that a route reads from ``VALUES[name]``, or its sampling's."""
    fields = {"model": "m", **BODIES[body], name: VALUES[name]}
    parsed = body.model_validate_json(json.dumps(fields))  # type: ignore[attr-defined]
    (params,) = parsed.params(defaults=GenerationDefaults(), max_tokens=9, with_text=True)
    return getattr(params.sampling if name in SAMPLING else params, name)


def python_value(name: str) -> Any:
    """Return the same parameter in Python."""
    value = VALUES[name]
    if name == "logit_bias":
        return SamplingParams(logit_bias={5: -1.0}).logit_bias
    return tuple(value) if isinstance(value, list) else value


def test_every_field_is_declared() -> None:
    assert set(SAMPLING) == {entry.name for entry in fields(SamplingParams)}
    others = {entry.name for entry in fields(GenerateParams)} - {"sampling"}
    assert set(declared_parameters(GenerateParams)) == others
    for name, entry in ALL.items():
        entry.check(entry.default)
        assert (entry.range is not None) == (entry.type in (int, float)), name


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("name", [n for n, entry in ALL.items() if entry.declaration.in_api])
def test_routes_have_the_parameters(body: type, name: str) -> None:
    assert api_value(body, name) == python_value(name) != ALL[name].default


@pytest.mark.parametrize("body", BODIES)
def test_routes_check_the_ranges(body: type) -> None:
    for entry in NUMBERS:
        if entry.declaration.in_api:
            sent = {"model": "m", **BODIES[body], entry.name: outside(entry)}
            with pytest.raises((ValidationError, Exception), match=entry.name):
                parsed = body.model_validate_json(json.dumps(sent))  # type: ignore[attr-defined]
                parsed.params(defaults=GenerationDefaults(), max_tokens=9, with_text=True)


@pytest.mark.parametrize("name", [n for n, entry in ALL.items() if entry.declaration.in_line])
def test_lines_have_the_parameters(name: str) -> None:
    line = prompt_of({"prompt": "b", name: VALUES[name]}, "line 1", "a")
    params = line.params(GenerateParams())
    value = getattr(params.sampling if name in SAMPLING else params, name)
    if name == "guide":
        assert value is not None and value.kind == "regex"
    else:
        assert value == python_value(name) != ALL[name].default


def test_lines_reject_other_parameters() -> None:
    for name, entry in ALL.items():
        if not entry.declaration.in_line:
            with pytest.raises(SpecbuildError, match=f"line 1 has no '{name}'"):
                prompt_of({"prompt": "b", name: True}, "line 1", "a")


def test_python_and_lines_check_the_ranges() -> None:
    for entry in NUMBERS:
        kind = SamplingParams if entry.name in SAMPLING else GenerateParams
        with pytest.raises(RequestError, match=f"{entry.name} is "):
            kind(**{entry.name: outside(entry)})
        line = prompt_of({"prompt": "b", entry.name: outside(entry)}, "line 1", "a")
        with pytest.raises(RequestError, match=f"line 1: {entry.name} is "):
            line.params(GenerateParams())


def test_run_has_an_option_for_each_parameter() -> None:
    groups = (SamplingOptions, OutputOptions, PromptOptions)
    options = {option.name: option for group in groups for option in group.options()}
    explained = {name for name, entry in ALL.items() if entry.declaration.help}
    assert set(options) - explained == {"prompt", "prompts", "raw_terminal"}
    for name in explained:
        option, declaration = options[name], ALL[name].declaration
        assert option.described.help == declaration.help
        assert option.described.metavar == declaration.metavar
        left_out = None if declaration.model_default or name == "guide" else ALL[name].default
        assert option.default == left_out, name
        for bound in (option.described.least, option.described.most):
            assert bound is None or bound in (declaration.range or ()), name
    help_page = (ROOT / "docs/cli.md").read_text()
    assert all(ALL[name].declaration.help in help_page for name in explained)


@pytest.mark.parametrize("name", SAMPLING)
def test_dynamo_passes_the_parameters(name: str) -> None:
    value = {5: -1.0} if name == "logit_bias" else VALUES[name]
    params = params_of({"sampling_options": {name: value}}, longest=9)
    assert getattr(params.sampling, name) == python_value(name)


def test_recommended_sampling_has_declared_parameters() -> None:
    recommended = {name for name, entry in ALL.items() if entry.declaration.model_default}
    assert {entry.name for entry in fields(GenerationDefaults)} == recommended
    assert set(GGUF_KEYS) == recommended - {"max_new_tokens"}
    for name in recommended:
        with pytest.raises(RequestError, match=name):
            GenerationDefaults(**{name: outside(ALL[name])})


def test_ports_have_the_names_of_the_op_choose() -> None:
    inputs = {spec.name: spec.dtype for spec in OP.inputs}
    assert inputs.pop("logits") == "float32" and inputs.pop("position") == "int32"
    assert inputs == {name: entry.dtype for name, entry in CHOOSE_INPUTS.items()}
    graph = {value.name for value in choose_graph(8).graph.inputs}
    assert graph == {"logits", "position", *CHOOSE_INPUTS} - {"floor"}
    plain = SamplingParams()
    for entry in CHOOSE_INPUTS.values():
        assert getattr(plain, entry.attribute) == entry.neutral


def test_the_page_has_declared_fields_with_their_bounds() -> None:
    page = (ROOT / "runtime/serve/page/index.html").read_text()
    ids = set(re.findall(r'<input id="(\w+)" type="number"', page)) & set(SAMPLING)
    assert ids == {"temperature", "top_p", "seed"}
    for name in ids:
        (tag,) = re.findall(rf'<input id="{name}"[^>]*>', page)
        for bound in re.findall(r'(?:min|max)="([\d.]+)"', tag):
            inside = ALL[name].range
            assert inside is not None and (float(bound) in inside or name == "top_p")


@pytest.mark.parametrize("page", ["run.md", "serve.md"])
def test_user_pages_list_the_parameters(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for name, entry in ALL.items():
        listed = entry.declaration.in_line if page == "run.md" else entry.declaration.in_api
        assert not listed or f"`{name}`" in text, name
