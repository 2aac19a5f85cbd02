"""The short forms of the Python API against ``generate``, and how an engine is closed."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from specbuild import Engine, GenerateParams, Prompt, RuntimeSettings, errors
from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.request import FinishEvent
from specbuild.runtime.sampling import SamplingParams

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def engine(tiny_engine: Path) -> Iterator[Engine]:
    with Engine.load(tiny_engine) as engine:
        yield engine


def reference(engine: Engine, prompt: str | Prompt, params: GenerateParams) -> str | None:
    """Return the text of ``generate`` without a draft."""
    *_, finish = engine.generate(prompt, params, speculation=None)
    assert isinstance(finish, FinishEvent)
    return finish.record.text


def test_text_and_answers_equal_generate(engine: Engine) -> None:
    params = GenerateParams(max_new_tokens=9, sampling=SamplingParams(temperature=0.8, seed=5))
    expected = reference(engine, "ab", params)
    assert engine.generate_text("ab", max_new_tokens=9, temperature=0.8, seed=5) == expected
    assert engine.generate_text(Prompt(prompt="ab"), params) == expected
    changed = GenerateParams(max_new_tokens=9, temperature=0.8)
    assert engine.generate_text("ab", changed, seed=5) == expected
    answer = reference(engine, Prompt(messages=CHAT), params)  # type: ignore[arg-type]
    assert engine.chat("Hi", params) == engine.chat(CHAT, params) == answer


def test_coroutines_are_decoded_in_one_batch(engine: Engine) -> None:
    texts = ["ab", "cd", "ef"]
    params = GenerateParams(max_new_tokens=9)
    expected = [reference(engine, text, params) for text in texts]

    async def all_of_them() -> list[str]:
        tasks = [engine.generate_text_async(text, params) for text in texts]
        return list(await asyncio.gather(*tasks))

    assert asyncio.run(all_of_them()) == expected
    assert asyncio.run(engine.chat_async("Hi", params)) == engine.chat("Hi", params)


def test_leaving_a_stream_early_aborts_its_request(engine: Engine) -> None:
    async def first_token() -> int:
        stream = engine.stream_async("ab", max_new_tokens=80)
        async for event in stream:
            await stream.aclose()
            return event.token_id  # type: ignore[union-attr]
        raise AssertionError

    first = asyncio.run(first_token())
    events = engine.stream("ab", max_new_tokens=80)
    assert next(events).token_id == first  # type: ignore[union-attr]
    events.close()  # type: ignore[attr-defined]
    engine.session.join(10)
    assert engine.used_pages == 0


def test_the_tokenizer_has_the_settings_of_the_engine(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    ids = tokenizer.encode("ab")
    assert tokenizer.decode(ids) == "ab"
    assert len(tokenizer) == engine.manifest.target.vocab
    chat = tokenizer.apply_chat_template(CHAT)
    (request,) = engine.check_prompts(Prompt(messages=CHAT))  # type: ignore[arg-type]
    assert request.prompt_ids == tokenizer.encode(chat, add_special_tokens=False)


def test_default_request_ids_are_indices(engine: Engine) -> None:
    prompts = [Prompt(prompt="a"), Prompt("named", prompt="b"), "c"]
    assert [r.id for r in engine.check_prompts(prompts)] == ["0", "named", "2"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"max_tokens": 3}, "GenerateParams has no 'max_tokens'; did you mean max_new_tokens?"),
        ({"temprature": 1}, "did you mean temperature?"),
        ({"temperature": -1}, "temperature is -1"),
    ],
)
def test_reports_an_invalid_keyword_in_one_line(
    engine: Engine, words: dict[str, typing.Any], sentence: str
) -> None:
    for call in (engine.generate_text, engine.chat, engine.stream):
        with pytest.raises(errors.RequestError) as caught:
            call("ab", **words)
        assert sentence in str(caught.value)
    with pytest.raises(errors.RequestError, match="did you mean threads"):
        RuntimeSettings(num_threads=2)  # type: ignore[call-arg]
    with pytest.raises(errors.RequestError, match="did you mean messages"):
        Prompt(mesages=CHAT)  # type: ignore[call-arg]
    with pytest.raises(errors.RequestError, match="must be a string or a Prompt"):
        engine.generate_text(["ab"])  # type: ignore[arg-type]


def test_typed_keywords_equal_the_fields() -> None:
    """The constructor that type checkers read has exactly the fields."""
    source = inspect.getsource(GenerateParams)
    typed = source.partition("def __init__(")[2].partition(") -> None")[0]
    names = {line.partition(":")[0].strip() for line in typed.splitlines() if ":" in line}
    fields = [*dataclasses.fields(GenerateParams), *dataclasses.fields(SamplingParams)]
    assert names == {entry.name for entry in fields}


def test_repr_of_params_shows_changed_fields() -> None:
    assert repr(GenerateParams()) == "GenerateParams()"
    changed = GenerateParams(temperature=0.5, stop=("x",))
    assert repr(changed) == "GenerateParams(temperature=0.5, stop=('x',))"
    assert dataclasses.replace(changed, top_p=0.5).sampling == SamplingParams(0.5, 0.5)


def test_a_closed_engine_rejects_requests(tiny_engine: Path) -> None:
    with Engine.load(tiny_engine) as engine:
        assert f"<Engine {tiny_engine}: gpt_oss for cpu, drafters: eagle3," in repr(engine)
        stream = engine.session.add(
            engine.check_prompts("ab", GenerateParams(max_new_tokens=80)),
            DraftSetting(),
        )
        next(stream)
    *_, finish = stream
    assert finish.record.finish_reason in ("abort", "length")  # type: ignore[union-attr]
    assert repr(engine).endswith("closed>")
    with pytest.raises(errors.RequestError, match="the engine is closed"):
        engine.generate_text("ab")
    engine.close()


def test_an_engine_without_a_tokenizer_rejects_text(ids_engine: Path) -> None:
    with Engine.load(ids_engine) as engine:
        for use in (lambda: engine.tokenizer, lambda: engine.generate_text("ab")):
            with pytest.raises(errors.RequestError, match="no tokenizer"):
                use()
