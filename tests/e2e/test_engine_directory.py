"""Engine directories: rebuilt byte for byte, moved, interrupted, and equal to transformers."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
import torch
from checkpoints import write_draft, write_target
from safetensors.torch import load_file, save_file
from shared_graphs import exported_anew

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.settings import RuntimeSettings


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engines")
    write_target(path / "target", layers=2, vocab=300, tokenizer=True)
    write_draft(path / "draft", target_layers=2, target_vocab=300)
    return path


def options(checkpoints: Path, output: Path, **changes: object) -> BuildOptions:
    return BuildOptions.from_flat(
        model=checkpoints / "target",
        draft=checkpoints / "draft",
        output=output,
        **changes,  # type: ignore[arg-type]
    )


def with_values(source: Path, copy: Path, name: str, value: float) -> Path:
    """Return a copy of checkpoints with one value of a tensor changed."""
    shutil.copytree(source, copy)
    folder, _, tensor = name.partition(":")
    file = copy / folder / "model.safetensors"
    tensors = load_file(file)
    tensors[tensor].view(-1)[-1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    return copy


@pytest.fixture(scope="module")
def built(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of the checkpoints; tests that change it use a copy."""
    engine = tmp_path_factory.mktemp("built") / "engine"
    with exported_anew():
        build(options(checkpoints, engine), SilentProgress())
    return engine


def test_graphs_load_with_their_external_weights(built: Path) -> None:
    stored = load_file(built / "weights.safetensors")
    tensors, names = read_manifest(built).tensors, set()
    quiet = ort.SessionOptions()
    quiet.log_severity_level = 3
    for file in built.glob("*.onnx"):
        ort.InferenceSession(file, quiet, providers=["CPUExecutionProvider"])
        for value in onnx.load(file).graph.initializer:
            if value.name in tensors:
                raw = stored[tensors[value.name].same_as or value.name].numpy()
                array = onnx.numpy_helper.to_array(value)
                assert (array.dtype, array.tobytes()) == (raw.dtype, raw.tobytes()), value.name
                names.add(value.name)
    assert names == set(tensors)


def test_builds_in_different_folders_are_equal_byte_for_byte(
    checkpoints: Path, built: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(checkpoints, moved)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path\n"
            "from specbuild.builder.build import build\n"
            "from specbuild.builder.options import BuildOptions\n"
            "from specbuild.builder.progress import SilentProgress\n"
            "base = Path(sys.argv[1])\n"
            "build(BuildOptions(model=base / 'target', draft=base / 'draft',"
            " output=Path(sys.argv[2])), SilentProgress())",
            str(moved),
            str(tmp_path / "two"),
        ],
        check=True,
        capture_output=True,
    )
    assert done.returncode == 0
    first, second = contents(built), contents(tmp_path / "two")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    for name, data in first.items():
        assert str(built.parent).encode() not in data, name
        assert str(checkpoints).encode() not in data, name


def test_moved_engine_runs(built: Path, tmp_path: Path) -> None:
    shutil.copytree(built, tmp_path / "one")
    prompts = [Prompt("a", (5, 6, 7), None)]
    params = GenerateParams(max_new_tokens=8, ignore_eos=True)

    def output(folder: Path) -> tuple[int, ...]:
        events = Engine.load(folder, RuntimeSettings(device="cpu")).generate(prompts, params)
        return next(e.record.output_ids for e in events if isinstance(e, FinishEvent))

    before = output(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "renamed")
    assert output(tmp_path / "renamed") == before


def test_an_existing_engine_is_replaced_with_force_only(
    checkpoints: Path, built: Path, tmp_path: Path
) -> None:
    shutil.copytree(built, tmp_path / "e")
    before = contents(tmp_path / "e")
    with pytest.raises(SpecbuildError, match="exists; remove it or pass --force"):
        build(options(checkpoints, tmp_path / "e"), SilentProgress())
    assert contents(tmp_path / "e") == before
    changed = with_values(checkpoints, tmp_path / "changed", "target:model.norm.weight", 0.5)
    build(options(changed, tmp_path / "e", force=True), SilentProgress())
    assert contents(tmp_path / "e") != before
    assert {p.name for p in tmp_path.iterdir()} == {"e", "changed"}


def test_force_replaces_engines_only(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "mine.txt").write_text("kept")
    with pytest.raises(SpecbuildError, match="is no engine"):
        build(options(checkpoints, tmp_path / "e", force=True), SilentProgress())
    assert (tmp_path / "e" / "mine.txt").read_text() == "kept"


@pytest.mark.parametrize("place", ["target", "draft", "."])
def test_rejects_an_output_inside_the_input(checkpoints: Path, tmp_path: Path, place: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoints, copy)
    before = contents(copy)
    with pytest.raises(SpecbuildError, match="would replace"):
        build(options(copy, copy / place, force=True), SilentProgress())
    assert contents(copy) == before


def test_a_build_removes_the_files_of_a_killed_one(checkpoints: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    host = socket.gethostname()
    dead = tmp_path / f".e.building-{host}-{done.stdout.strip()}-x"
    alive = tmp_path / f".e.building-{host}-{os.getppid()}-x"
    for folder in (dead, alive):
        folder.mkdir()
    build(options(checkpoints, tmp_path / "e"), SilentProgress())
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["e", alive.name])


def test_failed_forced_build_keeps_the_old_engine(
    checkpoints: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(built, tmp_path / "e")
    before = contents(tmp_path / "e")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(SpecbuildError, match=r"GB free, .* are to be written"):
        build(options(checkpoints, tmp_path / "e", force=True), SilentProgress())
    assert contents(tmp_path / "e") == before
    assert [p.name for p in tmp_path.iterdir()] == ["e"]


@pytest.mark.slow
def test_a_killed_build_leaves_no_engine(checkpoints: Path, tmp_path: Path) -> None:
    """SIGKILL while the weights are written leaves no engine, not even a partial one."""
    script = (
        "import sys, time; from pathlib import Path\n"
        "from specbuild.builder.build import build\n"
        "from specbuild.builder.options import BuildOptions\n"
        "class Slow:\n"
        "    def start(self, stage, total, unit): print(stage, flush=True)\n"
        "    def advance(self, amount): time.sleep(0.2)\n"
        "    def note(self, message): pass\n"
        "base = Path(sys.argv[1])\n"
        "build(BuildOptions(model=base / 'target', output=Path(sys.argv[2])), Slow())\n"
    )
    output = tmp_path / "e"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(checkpoints), str(output)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("writing weights"):
            break
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL
    assert not output.exists()


@pytest.mark.parametrize(
    ("experts", "experts_format"),
    [
        (4, "mxfp4"),
        (24, "bf16"),
        pytest.param(4, "bf16", marks=pytest.mark.slow),
        pytest.param(24, "mxfp4", marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_equal_transformers(
    tmp_path: Path, experts_format: str, experts: int
) -> None:
    """Generate 64 tokens, with few experts (two dense Gemms) and many (the contrib op)."""
    from transformers import GptOssForCausalLM

    write_target(tmp_path / "t", experts_format=experts_format, experts=experts, layers=2)
    build(BuildOptions(model=tmp_path / "t", output=tmp_path / "e"), SilentProgress())
    reference = GptOssForCausalLM.from_pretrained(tmp_path / "t", dtype=torch.float32).float()
    generator = torch.Generator().manual_seed(experts)
    prompt = torch.randint(3, 256, (1, 21), generator=generator)
    with torch.no_grad():
        expected = reference.generate(
            prompt, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=1
        )[0, 21:]
    engine = Engine.load(tmp_path / "e", RuntimeSettings(device="cpu"))
    params = GenerateParams(max_new_tokens=64, ignore_eos=True)
    events = engine.generate([Prompt("a", tuple(prompt[0].tolist()), None)], params)
    record = next(e.record for e in events if isinstance(e, FinishEvent))
    assert record.output_ids == tuple(expected.tolist())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target:model.layers.1.mlp.experts.down_proj_scales", 255),
        ("target:model.norm.weight", float("nan")),
        ("draft:fc.weight", float("inf")),
    ],
)
def test_rejects_weights_that_are_not_finite(
    checkpoints: Path, tmp_path: Path, name: str, value: float
) -> None:
    broken = with_values(checkpoints, tmp_path / "broken", name, value)
    with pytest.raises(SpecbuildError, match=f"tensor {name.partition(':')[2]} holds .*--allow-"):
        build(options(broken, tmp_path / "engine"), SilentProgress())
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]
    if name.endswith("norm.weight"):
        build(options(broken, tmp_path / "engine", allow_nonfinite=True), SilentProgress())
