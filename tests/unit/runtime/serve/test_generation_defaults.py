"""Recommended sampling of a model, applied by every interface if a request states none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve.served import NAME, TEMPLATE, served, worded

from specbuild.cli.dynamo.requests import params_of
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.generation_defaults import GenerationDefaults
from specbuild.runtime.request import DEFAULT_PARAMS
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.serve.completions import CompletionFields
from specbuild.runtime.settings import GenerationConfig, RuntimeSettings

DEFAULTS = GenerationDefaults(
    temperature=0.7, top_p=0.8, top_k=5, min_p=0.01, repetition_penalty=1.2, max_new_tokens=5
)
HELLO = [{"role": "user", "content": "bcd"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "bcd", "max_tokens": 12},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 12},
    "/v1/responses": {"input": "bcd", "max_output_tokens": 12},
}


def recommending(generation_config: GenerationConfig = "auto") -> Engine:
    """Return a toy engine whose manifest has sampling defaults."""
    toy = worded(TEMPLATE)
    manifest = replace(toy.manifest, generation=DEFAULTS)
    settings = RuntimeSettings(generation_config=generation_config)
    return Engine(manifest, toy.executor, settings, text=toy.text)


def output(client: httpx.Client, route: str, **fields: Any) -> Any:
    answer = client.post(route, json={"model": NAME, "seed": 3, **ROUTES[route], **fields})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return body.get("choices") or [item["content"][0]["text"] for item in body["output"]]


@pytest.mark.parametrize("route", ROUTES)
def test_a_server_uses_the_recommended_sampling(route: str) -> None:
    stated = {name: value for name, value in DEFAULTS.sampling.items()}
    neutral = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    with served(recommending()) as (url, _), httpx.Client(base_url=url, timeout=300) as client:
        by_default = output(client, route)
        assert by_default == output(client, route, **stated)
        plain = output(client, route, **neutral)
        assert plain != by_default
        greedy = output(client, route, temperature=0, repetition_penalty=1)
        names = {"max_tokens": None, "max_completion_tokens": None, "max_output_tokens": None}
        body = {"model": NAME, **ROUTES[route], **names, "ignore_eos": True}
        usage = client.post(route, json=body).json()["usage"]
        assert usage.get("completion_tokens", usage.get("output_tokens")) == 5
    with (
        served(recommending("none")) as (url, _),
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        assert output(client, route) == plain
        assert output(client, route, temperature=0) == greedy


def test_python_uses_them_if_no_parameters_are_passed() -> None:
    engine = recommending()
    assert engine.default_params.sampling == SamplingParams(**DEFAULTS.sampling)
    assert engine.default_params.max_new_tokens == 5
    (request,) = engine.check_prompts("bcd")
    assert request.params == engine.default_params
    (request,) = engine.check_prompts("bcd", DEFAULT_PARAMS)
    assert request.params == DEFAULT_PARAMS
    assert recommending("none").default_params == worded().default_params == DEFAULT_PARAMS


def test_dynamo_uses_the_recommended_sampling() -> None:
    params = params_of({}, longest=77, defaults=DEFAULTS)
    assert replace(params.sampling, seed=0) == SamplingParams(**DEFAULTS.sampling)
    assert params.max_new_tokens == 5
    stated = {"sampling_options": {"temperature": 0}, "stop_conditions": {"max_tokens": 9}}
    params = params_of(stated, longest=77, defaults=DEFAULTS)
    assert (params.sampling.temperature, params.max_new_tokens) == (0, 9)


VALUES = {
    "temperature": st.sampled_from([0.0, 0.5, 1.0]),
    "top_p": st.sampled_from([0.5, 1.0]),
    "top_k": st.integers(0, 9),
    "min_p": st.sampled_from([0.0, 0.5]),
    "repetition_penalty": st.sampled_from([1.0, 1.5]),
}
OPTIONAL = st.fixed_dictionaries({}, optional=VALUES)
API = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@given(stated=OPTIONAL, recommended=OPTIONAL)
def test_request_fields_override_the_model_which_overrides_the_api(
    stated: dict[str, Any], recommended: dict[str, Any]
) -> None:
    body = CompletionFields(model=NAME, prompt="b", seed=1, **stated)
    defaults = GenerationDefaults(**recommended)
    (params,) = body.params(defaults=defaults, max_tokens=1, with_text=True)
    assert params.sampling == SamplingParams(seed=1, **{**API, **recommended, **stated})
