"""Building the engines for a comparison: cached parts, failures, and substitutes."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx
import pytest
from script_modules import BENCHMARKS, script_modules

SUCCESS = 0
# A substitute for specbuild: it writes an engine, or fails for long contexts.
SPECBUILD = """#!{python}
import pathlib, sys
if "131072" in sys.argv:
    sys.exit("specbuild: too long")
engine = pathlib.Path(sys.argv[-2])
(engine / "programs").mkdir(parents=True)
(engine / "manifest.json").write_text(" ".join(sys.argv[1:-2]))
(engine / "weights.safetensors").write_bytes(bytes(9999))
"""


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with script_modules(BENCHMARKS, "build_engines", "engine_matrix", "kernel_cache") as modules:
        yield modules


def test_engines_are_built_by_the_command_line_and_failures_reported(
    scripts: dict[str, ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script, command, folder = scripts["build_engines"], tmp_path / "specbuild", tmp_path / "made"
    command.write_text(SPECBUILD.format(python=sys.executable))
    command.chmod(0o755)
    monkeypatch.setattr(script, "LARGE_BYTES", 5000)
    arguments = ["build_engines.py", folder, "--specbuild", command, "--only", "synth-20b-cuda*"]
    monkeypatch.setattr(sys, "argv", list(map(str, arguments)))
    assert script.main() == 1
    output = capsys.readouterr().out
    assert "synth-20b-cuda-tree" in output and "specbuild: too long" in output
    assert "1 engines in" in output
    assert (folder / "synth-20b-cuda" / "manifest.json").read_text().startswith("synth --geometry")
    digest, size = (folder / "synth-20b-cuda" / "weights.safetensors.sha256").read_text().split()
    assert (len(digest), size) == (64, "9999")
    assert not (folder / "synth-20b-cuda" / "weights.safetensors").exists()
    monkeypatch.setattr(sys, "argv", list(map(str, [*arguments[:-1], "synth-20b-cuda"])))
    assert script.main() == 0
    assert "0 engines in" in capsys.readouterr().out


def test_every_example_is_a_separate_command(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    matrix = scripts["engine_matrix"]
    examples = [name for name in matrix.NAMES if name.startswith(("example-", "synth-"))]
    commands = matrix.commands(examples, tmp_path)
    assert len({tuple(command) for command in commands.values()}) == len(examples)
    both = Path(commands["example-cuda-mla-32-dsa"][2])
    assert {"mla_kv.safetensors", "dsa_indexer.safetensors", "model.safetensors"} <= {
        file.name for file in both.iterdir()
    }


class Compiler:
    """A substitute for ``cuda.bindings.nvrtc``: code is the text in capitals.

    ``bad`` is rejected.
    """

    def __init__(self) -> None:
        self.compiled: list[bytes] = []

        def compile_program(program: list[bytes], _count: int, _options: list[bytes]) -> Any:
            self.compiled.append(program[0])
            return (int(program[0] == b"bad"),)

        def put(data: bytes, place: bytes) -> Any:
            ctypes.memmove(ctypes.c_char_p(place), data, len(data))
            return (SUCCESS,)

        self.nvrtcResult = SimpleNamespace(NVRTC_SUCCESS=SUCCESS)
        self.nvrtcVersion = lambda: (SUCCESS, 13, 5)
        self.nvrtcCreateProgram = lambda text, *_: (SUCCESS, [text])
        self.nvrtcCompileProgram = compile_program
        self.nvrtcGetProgramLogSize = lambda _: (SUCCESS, 3)
        self.nvrtcGetProgramLog = lambda _, place: put(b"log", place)
        self.nvrtcGetCUBINSize = lambda program: (SUCCESS, len(program[0]))
        self.nvrtcGetCUBIN = lambda program, place: put(program[0].upper(), place)
        self.nvrtcDestroyProgram = lambda _: (SUCCESS,)


def compile_with(nvrtc: Any, text: bytes, *options: str) -> tuple[int, bytes, bytes]:
    """Compile as the builder does."""
    _, program = nvrtc.nvrtcCreateProgram(text, b"op/kernel.cu", 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
    nvrtc.nvrtcGetProgramLog(program, log)
    code = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return status, log, code


def test_the_key_of_the_cache_covers_all_inputs_of_the_compiler(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    text = b'#include "../shared/a.cuh"\nkernel'
    for tree in ("one", "two"):
        for name, content in (("shared/a.cuh", '#include "b.cuh"'), ("shared/b.cuh", "b")):
            (tmp_path / tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / tree / name).write_text(content)
        (tmp_path / tree / "op").mkdir()
    one, two = (f"-I{tmp_path / tree / 'op'}" for tree in ("one", "two"))
    counts = []

    def ask(text: bytes, *options: str) -> tuple[int, bytes, bytes]:
        compiler = Compiler()
        nvrtc = SimpleNamespace(**vars(compiler))
        scripts["kernel_cache"].install(nvrtc, tmp_path / "cache")
        result = compile_with(nvrtc, text, *options)
        counts.append(len(compiler.compiled))
        return result

    expected = (SUCCESS, b"log", text.upper())
    assert ask(text, one) == ask(text, one) == ask(text, two) == expected
    assert ask(text, one, "-DK=2") == expected
    (tmp_path / "two" / "shared" / "b.cuh").write_text("changed")
    assert ask(text, two) == expected
    assert counts == [1, 0, 0, 1, 1]
    assert [ask(b"bad")[0], ask(b"bad")[0]] == [1, 1]
    assert counts[-2:] == [1, 1]


@pytest.mark.parametrize("name", ["tensorrt", "tensorrt_rtx"])
def test_the_substitute_records_its_arguments(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / "tensorrt_stand_in.py")
    assert spec is not None and spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    library.__dict__["_pretend_gpu"] = lambda: None
    port = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["T", 4])
    out = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["T", 4])
    node = onnx.helper.make_node("Plugin", ["x"], ["y"], domain="ours", fields="text", number=3)
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [port], [out]))

    def engine(**changes: int) -> bytes:
        for attribute in model.graph.node[0].attribute:
            if attribute.name in changes:
                attribute.i = changes[attribute.name]
        builder = library.Builder(library.ILogger())
        network = builder.create_network(0)
        parser = library.OnnxParser(network, None)
        assert parser.load_model_proto(model.SerializeToString(), "graph.onnx")
        config = builder.create_builder_config()
        config.set_flag(library.BuilderFlag.TF32)
        config.set_compute_capability(library.ComputeCapability.SM120, 0)
        profile = builder.create_optimization_profile()
        profile.set_shape("x", (1, 4), (2, 4), (3, 4))
        assert config.add_optimization_profile(profile) >= 0
        assert config.num_optimization_profiles == 1
        written: list[bytes] = []
        writer = SimpleNamespace(write=written.append)
        assert builder.build_serialized_network_to_stream(network, config, writer)
        return b"".join(written)

    test_double = engine()
    record = json.loads(test_double[64:])
    assert test_double == engine()
    assert record["nodes"] == [{"name": "", "op": "Plugin", "attributes": {"fields": "text"}}]
    assert record["settings"][0] == ["set_flag", "BuilderFlag.TF32"]
    assert test_double[:4] == b"vtrt" and test_double[32] == 1 << 4
    assert json.loads(engine(number=4)[64:])["graph"] != record["graph"]
