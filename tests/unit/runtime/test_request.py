"""Prompts and parameters of ``Engine.generate``, and its errors for anything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy_engine import prompt, toy_engine

from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt, prompt_list
from specbuild.runtime.sampling import SamplingParams

FEW = GenerateParams(max_new_tokens=3, ignore_eos=True)


class LetterCodec:
    """Encode the letters a to z as 1 to 26, and count the calls."""

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, text: str, **_: Any) -> tuple[int, ...]:
        self.encoded += 1
        return tuple(ord(letter) - 96 for letter in text)

    def stream(self, _: Any, **_options: Any) -> None:
        return None


@pytest.fixture
def engine() -> Engine:
    return toy_engine(text=LetterCodec())  # type: ignore[arg-type]


def records(engine: Engine, prompts: Any, *params: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return ids and prompt ids of the results, in the order of the prompts."""
    events = engine.generate(prompts, *(params or (FEW,)), speculation=None)
    done = {e.request: e.record for e in events if isinstance(e, FinishEvent)}
    return [(done[i].id, done[i].prompt_ids) for i in range(len(done))]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("ab", [("0", (1, 2))]),
        (Prompt("p", prompt="ab"), [("p", (1, 2))]),
        (Prompt("p", prompt_ids=(1, 2)), [("p", (1, 2))]),
        (["ab", Prompt("p", (3,)), "c"], [("0", (1, 2)), ("p", (3,)), ("2", (3,))]),
        (("ab",), [("0", (1, 2))]),
        ((letters for letters in ("a", "b")), [("0", (1,)), ("1", (2,))]),
        ([], []),
    ],
)
def test_prompts_are_a_string_a_prompt_or_any_iterable_of_either(
    engine: Engine, given: Any, expected: list[tuple[str, tuple[int, ...]]]
) -> None:
    assert records(engine, given) == expected


def test_parameters_have_defaults_and_may_differ(engine: Engine) -> None:
    (only,) = [e for e in engine.generate("ab") if isinstance(e, FinishEvent)]
    assert 0 < len(only.record.output_ids) <= GenerateParams().max_new_tokens
    events = engine.generate((p for p in "ab"), [FEW, GenerateParams(2, ignore_eos=True)])
    finished = {e.request: e.record for e in events if isinstance(e, FinishEvent)}
    assert [len(finished[i].output_ids) for i in (0, 1)] == [3, 2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "prompts is of type NoneType, must be a string, a Prompt, or an iterable"),
        (5, "prompts is of type int, must"),
        ({"id": "a", "prompt": "ab"}, "prompts is of type dict, must"),
        ([1, 2], "prompt 0 is of type int, must be a string or a Prompt; token ids go into Prompt"),
        (["a", b"b"], "prompt 1 is of type bytes, must be a string or a Prompt"),
        ([["a"]], "prompt 0 is of type list, must"),
        (["a", ""], "prompt '1' is empty"),
    ],
)
def test_rejects_other_types(engine: Engine, given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        engine.generate(given, FEW)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([FEW], "2 prompts, but 1 sets of parameters"),
        (5, "params is 5, must be GenerateParams or one for each prompt"),
        ([FEW, 5], "must be GenerateParams or one for each prompt"),
        ({"max_new_tokens": 3}, "must be GenerateParams"),
    ],
)
def test_rejects_other_parameters(engine: Engine, params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.generate(["a", "b"], params)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "prompt 'a' has neither prompt nor prompt_ids nor messages: give one of them"),
        ({"prompt": "x", "prompt_ids": (1,)}, "prompt 'a' has both"),
        ({"prompt": ""}, "prompt 'a' is empty"),
        ({"prompt_ids": ()}, "prompt 'a' is empty"),
        ({"prompt": 5}, "prompt 'a': prompt is 5, must be a string"),
        ({"prompt_ids": 5}, "prompt 'a': prompt_ids is 5, must be token ids"),
        ({"prompt_ids": "12"}, "prompt_ids is '12', must be token ids"),
        ({"prompt_ids": (1, 2.5)}, "prompt 'a': a token id is 2.5, must be a whole number"),
    ],
)
def test_a_prompt_is_ids_or_text(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Prompt("a", **values)


def test_a_prompts_id_is_a_string() -> None:
    with pytest.raises(RequestError, match="a prompt's id is 3, must be a string"):
        Prompt(3, prompt="x")  # type: ignore[arg-type]


def test_token_ids_may_be_an_array() -> None:
    ids = Prompt("a", prompt_ids=np.array([1, 2])).prompt_ids  # type: ignore[arg-type]
    assert ids == (1, 2)
    assert all(type(i) is int for i in ids or ())


def test_a_list_is_not_read_twice() -> None:
    given = [prompt([1]), prompt([2])]
    assert prompt_list(given) == given


def test_text_is_encoded_once(engine: Engine) -> None:
    requests = engine.check_prompts(["ab", "c"], FEW)
    list(engine.decode(requests, speculation=None))
    assert engine.text.encoded == 2  # type: ignore[union-attr]
    assert [r.prompt_ids for r in requests] == [(1, 2), (3,)]


@pytest.mark.parametrize(
    "values", [{"stop": 7}, {"stop": (7,)}, {"stop_token_ids": 7}, {"stop_token_ids": (0.5,)}]
)
def test_stops_are_collections_of_their_kind(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="must be"):
        GenerateParams(**values)


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="leave detokenize on"):
        GenerateParams(stop=("a",), detokenize=False)


@pytest.mark.parametrize("values", [{"temperature": [1]}, {"top_p": ()}, {"top_p": None}])
def test_rejects_sampling_values_that_are_not_numbers(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="must be a number"):
        SamplingParams(**values)
