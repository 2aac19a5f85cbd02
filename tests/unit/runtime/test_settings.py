"""Runtime settings: one frozen object, validated once, and its effects on an engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from engine_directory import write_engine
from toy_engine import prompt, toy_engine

from specbuild.runtime.decode.decoder import Decoder
from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.settings import PrefillSchedule, RuntimeSettings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kv_policy": "most"}, "kv_policy is 'most', must be one of guaranteed-no-evict, max"),
        ({"prefix_caching": True}, "prefix_caching is True, must be one of off, auto, on"),
        ({"generation_config": "some"}, "generation_config is 'some', must be one of auto, none"),
        ({"publish_generated_pages": True}, "needs the prefix cache: set prefix_caching"),
    ],
)
def test_rejects_an_invalid_value(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        RuntimeSettings(**values)


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RuntimeSettings().kv_policy = "max-utilization"  # type: ignore[misc]


def test_a_schedule_has_no_negative_number_of_steps() -> None:
    with pytest.raises(RequestError, match="steps_between is -1, must be 0 or above"):
        PrefillSchedule(steps_between=-1)


def test_keywords_of_load_are_deprecated_and_still_work(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    write_engine(tmp_path / "engine")
    with pytest.warns(DeprecationWarning, match="pass RuntimeSettings"):
        engine = Engine.load(tmp_path / "engine", threads=1, generation_config="none")
    assert engine.settings == RuntimeSettings(threads=1, generation_config="none")
    with pytest.raises(RequestError, match="nonsense"):
        Engine.load(tmp_path / "engine", nonsense=1)


def test_a_chat_template_needs_a_tokenizer(tmp_path: Path) -> None:
    write_engine(tmp_path / "engine")
    with pytest.raises(RequestError, match="chat_template: the engine has no tokenizer"):
        Engine.load(tmp_path / "engine", RuntimeSettings(chat_template="{{ messages }}"))


def test_generate_checks_requests_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, checked = toy_engine(), []
    check: Any = type(engine.decoder).check

    def counting(decoder: Decoder, *rest: Any) -> None:
        checked.append(rest)
        check(decoder, *rest)

    monkeypatch.setattr(type(engine.decoder), "check", counting)
    events = engine.generate([prompt([1, 2, 3])], GenerateParams(max_new_tokens=2))
    list(events)
    assert len(checked) == 1
