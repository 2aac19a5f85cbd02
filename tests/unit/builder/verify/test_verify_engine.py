"""``verify_engine`` end to end: correct engines pass, others fail at the faulty stage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoints import write_draft, write_target
from further_drafts import FURTHER, write_further_draft
from safetensors.torch import load_file, save_file

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.verify import VerifyReport, verify_engine
from specbuild.builder.verify.engine_probe import _with_outputs
from specbuild.runtime.errors import SpecbuildError


def build_engine(folder: Path, model: Path, draft: Path | None = None, **changes) -> Path:
    options = BuildOptions.from_flat(
        model=model, draft=draft, output=folder / "engine", max_seq_len=128, **changes
    )
    build(options, SilentProgress())
    return options.output


@pytest.fixture(scope="module")
def engine(tmp_path_factory, target_path, draft_path) -> Path:
    return build_engine(tmp_path_factory.mktemp("engine"), target_path, draft_path)


def failed(report: VerifyReport) -> list[str]:
    return [row.stage for row in report.rows if not row.passed]


def test_every_stage_of_a_correct_engine_passes(engine, target_path, draft_path):
    report = verify_engine(engine, target_path, draft_path, SilentProgress())
    assert report.passed and failed(report) == []
    stages = [row.stage for row in report.rows]
    assert stages == [
        *(f"target layer.{i}" for i in range(4)),
        "target pre_head",
        "aux hidden states",
        "target logits",
        "fuse",
        "draft attention",
        "draft ffn",
        "draft pre_head",
        "draft recurrence",
        "draft logits",
    ]
    by_stage = {row.stage: row for row in report.rows}
    # Two samples: 24 committed rows with a window of 8, and 7 tree nodes; 3 draft levels of 2.
    assert by_stage["target logits"].rows == 2 * (32 + 7)
    assert by_stage["draft logits"].rows == 2 * (32 + 6)
    assert [row.name for row in report.losslessness] == [
        "greedy: without draft = transformers",
        "greedy: chain of 4 = without draft",
        "greedy: tree of 10 = without draft",
        "sampled: chain of 4 = without draft",
        "sampled: tree of 10 = without draft",
    ]
    assert all(row.tokens > 0 and row.prompts == 6 for row in report.losslessness)


def test_the_first_failing_stage_is_the_faulty_one(engine, target_path, draft_path, tmp_path):
    changed = tmp_path / "target"
    shutil.copytree(target_path, changed)
    tensors = load_file(changed / "model.safetensors")
    tensors["model.layers.2.self_attn.sinks"] += 1.0
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    report = verify_engine(engine, changed, draft_path, SilentProgress())
    assert not report.passed
    assert failed(report)[0] == "target layer.2"


def test_another_draft_fails_stages_of_the_draft_only(engine, target_path, tmp_path):
    write_draft(tmp_path / "draft", seed=9)
    report = verify_engine(engine, target_path, tmp_path / "draft", SilentProgress())
    assert failed(report)[0] == "fuse"
    assert all(not stage.startswith("target") for stage in failed(report))


def test_engine_without_a_draft(tmp_path, bf16_target_path, draft_path):
    engine = build_engine(tmp_path, bf16_target_path)
    report = verify_engine(engine, bf16_target_path, None, SilentProgress())
    assert report.passed
    assert [row.name for row in report.losslessness] == ["greedy: without draft = transformers"]
    with pytest.raises(SpecbuildError, match="has no draft"):
        verify_engine(engine, bf16_target_path, draft_path, SilentProgress())


def test_rejects_checkpoints_of_another_shape(engine, target_path, tmp_path):
    write_target(tmp_path / "target", layers=2)
    with pytest.raises(SpecbuildError, match="was built from a model of"):
        verify_engine(engine, tmp_path / "target", None, SilentProgress())
    write_draft(tmp_path / "draft", draft_vocab=64)
    with pytest.raises(SpecbuildError, match="use the draft that the engine was built from"):
        verify_engine(engine, target_path, tmp_path / "draft", SilentProgress())
    with pytest.raises(SpecbuildError):
        verify_engine(target_path, target_path, None, SilentProgress())


# Each variant needs two exports and all stages; test_cuda_fusion.py covers most of them without
# verify.
VARIANTS = {
    "two layers of MLA": {
        "layers": 2,
        "latent": {
            "kv_lora_rank": 40,
            "q_lora_rank": 48,
            "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 16,
            "v_head_dim": 20,
        },
    },
    "norm per state": {"fc_norm": True, "norm_output": True, "own_embedding": True},
    "other sizes": {"hidden": 64, "q_heads": 6, "head_dim": 16, "aux_layers": (0, 2, 2, 3)},
    "norms before fuse": {"norm_before_fc": True, "norm_before_residual": True},
    "narrow, shared head": {"input_width": "hidden", "draft_vocab": None},
    "yarn, window": {
        "sliding_window": 6,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "three layers": {"layers": 3, "prefix": "layers.0", "fc_norm": True, "sliding_window": 9},
    "windowed, on one KV head": {"layers": 2, "q_heads": 16, "kv_heads": 1, "head_dim": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FURTHER)
def test_drafts_with_additional_tensors(name, target_path, tmp_path):
    write_further_draft(tmp_path / "draft", name)
    engine = build_engine(tmp_path, target_path, tmp_path / "draft")
    report = verify_engine(engine, target_path, tmp_path / "draft", SilentProgress())
    assert failed(report) == []
    assert report.passed


@pytest.mark.slow
def test_verify_uses_the_norm_output_of_the_engine(target_path, tmp_path):
    """SpecForge's meaning: the next level reads the state before its norm."""
    write_draft(tmp_path / "draft", norm_output=True)
    options = BuildOptions.from_flat(
        model=target_path, draft=tmp_path / "draft", output=tmp_path / "engine",
        max_seq_len=128, max_batch_size=2, draft_norm_output="head",
    )  # fmt: skip
    build(options, SilentProgress())
    report = verify_engine(options.output, target_path, tmp_path / "draft", SilentProgress())
    assert failed(report) == []


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_published_draft_formats(variant, target_path, tmp_path):
    write_draft(tmp_path / "draft", **VARIANTS[variant])
    engine = build_engine(tmp_path, target_path, tmp_path / "draft")
    report = verify_engine(engine, target_path, tmp_path / "draft", SilentProgress())
    assert failed(report) == []
    assert report.passed


@pytest.mark.parametrize(
    ("built_for", "depths"), [(1, (1,)), pytest.param(6, (4, 6), marks=pytest.mark.slow)]
)
def test_verify_runs_the_chain_of_the_engine(target_path, draft_path, tmp_path, built_for, depths):
    chain = {"draft_top_k": 1, "draft_depth": built_for, "draft_tokens": built_for}
    engine = build_engine(tmp_path, target_path, draft_path, **chain)
    report = verify_engine(engine, target_path, draft_path, SilentProgress())
    assert report.passed
    assert [row.name for row in report.losslessness][1:] == [
        f"{choice}: chain of {depth} = without draft"
        for choice in ("greedy", "sampled")
        for depth in depths
    ]


def test_the_error_names_a_missing_stage():
    import onnx

    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph([node], "g", [value("x", 1, [1])], [value("y", 1, [1])])
    model = onnx.helper.make_model(graph).SerializeToString()
    with pytest.raises(SpecbuildError, match=r"graphs/target\.onnx: has no value named stage\.a"):
        _with_outputs(model, ["stage.a"], "graphs/target.onnx")
