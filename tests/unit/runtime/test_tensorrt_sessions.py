"""The contexts of a deserialized engine, and the library that creates them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from plugin_engine import HostGpu, Stream

from specbuild.runtime.errors import EngineFileError, UnsupportedHereError
from specbuild.runtime.executors.tensorrt import library
from specbuild.runtime.executors.tensorrt.sessions import EngineSession


def test_reports_a_missing_or_broken_library_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library_reason", lambda _: "TensorRT is not installed; x")
    with pytest.raises(UnsupportedHereError, match="TensorRT is not installed"):
        library.load("tensorrt")
    monkeypatch.setattr(library, "library_reason", lambda _: None)

    def broken(_name: str) -> Any:
        raise OSError("libnvinfer.so.10: cannot open shared object file")

    monkeypatch.setattr(library.importlib, "import_module", broken)
    with pytest.raises(UnsupportedHereError, match=r"cannot be loaded \(libnvinfer"):
        library.load("tensorrt")


@dataclass
class Context:
    """An execution context that records its calls."""

    told: list[tuple[Any, ...]]
    refuses: str = ""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> bool:
            self.told.append((name, *arguments))
            return name != self.refuses

        return call


class Engine:
    """A deserialized engine with one dynamic input, one weight and one output."""

    device_memory_size_v2 = 4096
    num_io_tensors = 3

    def __init__(self, refuses: str = "", on_host: str = "", alias: str | None = None) -> None:
        self.on_host = on_host
        self.alias = alias
        self.told: list[tuple[Any, ...]] = []
        self.refuses = refuses

    def get_tensor_name(self, index: int) -> str:
        return ("token_ids", "weight", "logits")[index]

    def get_tensor_mode(self, name: str) -> str:
        return "output" if name == "logits" else "input"

    def get_tensor_location(self, name: str) -> str:
        return "host" if name == self.on_host else "device"

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.alias if name == "logits" else None

    def create_execution_context(self, strategy: str) -> Context:
        self.told.append(("create", strategy))
        return Context(self.told, self.refuses)


LIBRARY = SimpleNamespace(
    TensorIOMode=SimpleNamespace(INPUT="input"),
    TensorLocation=SimpleNamespace(HOST="host"),
    ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user managed"),
)


class NumberedStream(Stream):
    """A stream with a handle, as TensorRT requires."""

    def __int__(self) -> int:
        return 77


def test_an_engine_has_a_context_for_each_profile() -> None:
    gpu, engine = HostGpu(), Engine()
    session = EngineSession(LIBRARY, gpu, engine, "target", [])  # type: ignore[arg-type]
    addresses = {"token_ids": 1, "weight": 2, "logits": 3}
    for profile in (2, 2, 0):
        session.queue(profile, {"token_ids": (4,)}, addresses, NumberedStream(), scalars={})
    (scratch,) = gpu.held
    once = [
        ("set_input_shape", "token_ids", (4,)),
        ("set_tensor_address", "token_ids", 1),
        ("set_tensor_address", "weight", 2),
        ("set_tensor_address", "logits", 3),
        ("execute_async_v3", 77),
    ]
    made = [("create", "user managed")]
    memory = [("set_device_memory", scratch, 4096)]
    assert engine.told == [
        *made, ("set_optimization_profile_async", 2, 77), *memory, *once, *once,
        *made, ("set_optimization_profile_async", 0, 77), *memory, *once,
    ]  # fmt: skip
    session.close()
    assert not gpu.held


def test_a_value_that_shapes_follow_from_is_read_on_the_host() -> None:
    engine = Engine(on_host="token_ids")
    session = EngineSession(LIBRARY, HostGpu(), engine, "expand", [])  # type: ignore[arg-type]
    addresses = {"token_ids": 1, "weight": 2, "logits": 3}
    for value in (5, 7):
        session.queue(0, {}, addresses, NumberedStream(), scalars={"token_ids": value})
        place = [told[2] for told in engine.told if told[:2] == ("set_tensor_address", "token_ids")]
        assert ctypes.c_int32.from_address(place[-1]).value == value


@pytest.mark.parametrize(
    "refused",
    [
        "set_input_shape",
        "set_tensor_address",
        "execute_async_v3",
        "set_optimization_profile_async",
    ],
)
def test_reports_the_errors_of_tensorrt(refused: str) -> None:
    session = EngineSession(
        LIBRARY,
        HostGpu(),
        Engine(refused),
        "draft",
        ["Error Code 4:\n shape"],  # type: ignore[arg-type]
    )
    addresses = {"token_ids": 1, "weight": 2, "logits": 3}
    with pytest.raises(UnsupportedHereError, match=r"of role draft \(Error Code 4: shape\)"):
        session.queue(0, {"token_ids": (4,)}, addresses, NumberedStream(), scalars={})


def test_outputs_that_alias_an_input_are_in_its_memory() -> None:
    engine = Engine(alias="token_ids")
    session = EngineSession(LIBRARY, HostGpu(), engine, "commit", [])  # type: ignore[arg-type]
    addresses = {"token_ids": 1, "weight": 2, "logits": 1}
    session.queue(0, {}, addresses, NumberedStream(), scalars={})
    with pytest.raises(EngineFileError, match="commit writes logits over token_ids, which"):
        session.queue(0, {}, addresses | {"logits": 3}, NumberedStream(), scalars={})


def test_rejects_an_unknown_tensor() -> None:
    session = EngineSession(LIBRARY, HostGpu(), Engine(), "draft", [])  # type: ignore[arg-type]
    with pytest.raises(EngineFileError, match="role draft has a tensor weight"):
        session.queue(0, {}, {"token_ids": 1, "logits": 3}, NumberedStream(), scalars={})
