"""The CUDA passes: the resulting graph, its results, and rejected graphs."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from checkpoints import write_draft, write_target
from engine_sizes import compute_engine_sizes
from further_drafts import FURTHER, write_further_draft
from fused_graphs import (
    EXAMPLE_LIMITS,
    PAGE,
    FusedModel,
    blank_pools,
    fused_model,
    kept_pools,
    launch_feeds,
    relative_error,
    run_graph,
)
from geometries import GPT_OSS_20B
from left_out import slow
from llama_checkpoints import write_llama
from safetensors.torch import load_file, save_file

from specbuild.builder import graphs
from specbuild.builder.backends.cuda.check import require_cuda_support
from specbuild.builder.backends.cuda.fusions.known_ops import only_known_ops
from specbuild.builder.backends.cuda.lowering import CUDA_PASSES
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.builder.checkpoint.target_parts import TargetCheckpoint
from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.builder.families.eagle3.reference import load_reference_draft
from specbuild.builder.families.gpt_oss.tensors import target_tensors
from specbuild.builder.graph.passes.pipeline import run_passes
from specbuild.builder.graph.passes.weights import recipe_of
from specbuild.builder.graph.weight_sources import WeightSources
from specbuild.builder.options import BuildOptions
from specbuild.plugins_cuda.body import BodyBuilder
from specbuild.plugins_cuda.linear.packing import unpack_rows
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-gpt-oss"
TOLERANCE = 0.03  # relative, of a row of hidden states or logits in bf16
LAYER = ["RmsQkvRope", "PagedTreeAttention", "Linear", "RmsMoe"]
DRAFT = [
    "DraftInput", "RmsQkvRope", "PagedTreeAttention", "Linear", "RmsSwiglu", "Linear", "RmsHead",
]  # fmt: skip

# For a draft with MLA, except the projection of the query latents.
ABSORBED = [
    "DraftInput", "RmsLowRank", "AbsorbQuery", "MlaAttention", "Linear", "RmsSwiglu", "Linear",
    "RmsHead",
]  # fmt: skip
LATENT = {
    "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
# The ops of a plain draft's graph that replace DRAFT.
DRAFT_VARIANTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": ({}, DRAFT),
    "own embedding": ({"own_embedding": True}, DRAFT),
    "target's head": ({"draft_vocab": None}, DRAFT),
    "no embedding half": ({"input_width": "hidden"}, DRAFT[1:]),
    "normed residual": ({"norm_before_residual": True}, ["DraftInput", *DRAFT]),
    "normed output": ({"norm_output": True}, [*DRAFT, "DraftInput"]),
    "norm before fc": ({"norm_before_fc": True}, DRAFT),
    "norms before fc": ({"fc_norm": True}, DRAFT),
    "one state normed": ({"fc_norm": True, "aux_layers": (1,)}, DRAFT),
    "two aux layers": ({"aux_layers": (2, 0)}, DRAFT),
    "one aux layer": ({"aux_layers": (1,)}, DRAFT),
    "windowed": ({"sliding_window": 5}, DRAFT),
    "MLA": ({"latent": LATENT | {"q_lora_rank": 64}}, [*ABSORBED, "Linear"]),
    "MLA, no query latent": ({"latent": LATENT | {"q_lora_rank": None}}, ABSORBED),
}
QUICK_VARIANTS = ("plain", "norms before fc", "MLA")


def ops_of(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_the_fused_target_equals_transformers(tmp_path: Path, dtype: str) -> None:
    from transformers import GptOssForCausalLM

    aux_layers = (2, 0, 1)
    write_target(tmp_path / "t", dtype=dtype)
    write_draft(tmp_path / "d", aux_layers=aux_layers, dtype=dtype)
    model = fused_model(tmp_path / "t", tmp_path / "d", page_size=PAGE).models["target"]
    reference_model = (
        GptOssForCausalLM.from_pretrained(tmp_path / "t", dtype=torch.float32).float().eval()
    )
    ids = torch.randint(3, 256, (60,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = reference_model(ids[None], output_hidden_states=True)
    pools, logits, aux_hidden = blank_pools(model), [], []
    for rows in (range(33), range(33, 34), range(34, 60)):  # chunks that split pages
        feeds = launch_feeds(model, rows, torch.arange(len(rows))) | pools
        feeds["token_ids"] = ids[rows.start : rows.stop].int()
        feeds["captured_blank"] = torch.full((len(rows), 3 * 64), float("nan")).bfloat16()
        outputs = run_graph(model, feeds)
        pools = kept_pools(outputs)
        logits.append(outputs["logits"])
        aux_hidden.append(outputs["captured"])
    for aux_layer, state in zip(aux_layers, torch.cat(aux_hidden).chunk(3, dim=-1), strict=True):
        error = relative_error(state, expected.hidden_states[aux_layer + 1][0])
        assert error.median() < TOLERANCE / 2
        # If a row's router nearly ties, another expert may be selected.
        assert error.quantile(0.95) < TOLERANCE
    error = relative_error(torch.cat(logits), expected.logits[0])
    assert error.median() < TOLERANCE / 2
    assert error.quantile(0.95) < TOLERANCE


def check_draft(tmp_path: Path, target: dict[str, torch.Tensor]) -> FusedModel:
    """Return the fused graphs of the draft in ``d``, after comparing them with the reference."""
    fused = fused_model(tmp_path / "t", tmp_path / "d", draft_only=True, page_size=PAGE)
    reference = load_reference_draft(
        tmp_path / "d",
        embedding=target["model.embed_tokens.weight"],
        head=target["lm_head.weight"],
    )
    assert fused.draft is not None
    committed, drafted = 20, 3
    generator = torch.Generator().manual_seed(3)
    width = len(fused.draft.geometry.aux_layers) * fused.target.geometry.hidden
    aux_hidden = torch.randn(committed, width, generator=generator).bfloat16()
    ids = torch.randint(0, 256, (committed + drafted,), generator=generator)
    expected = reference.follow(aux_hidden.float(), ids[:committed], ids[committed:])
    hidden = run_graph(fused.models["draft_fuse"], {"captured": aux_hidden})["hidden"]
    model = fused.models["draft"]
    pools, first, logits, recurrence = blank_pools(model), 0, [], []
    for count in (committed, *[1] * drafted):
        feeds = launch_feeds(model, range(first, first + count), torch.tensor([count - 1])) | pools
        feeds |= {"token_ids": ids[first : first + count].int(), "hidden": hidden}
        outputs = run_graph(model, feeds)
        pools, hidden = kept_pools(outputs), outputs["hidden_out"][-1:]
        first += count
        logits.append(outputs["draft_logits"])
        recurrence.append(hidden)
    assert relative_error(torch.cat(recurrence), expected.recurrence).max() < TOLERANCE
    assert relative_error(torch.cat(logits), expected.logits).max() < TOLERANCE
    return fused


@pytest.mark.parametrize(
    "variant", [*QUICK_VARIANTS, *slow(*(v for v in DRAFT_VARIANTS if v not in QUICK_VARIANTS))]
)
def test_the_fused_draft_equals_the_reference(tmp_path: Path, variant: str) -> None:
    changes, ops = DRAFT_VARIANTS[variant]
    target = write_target(tmp_path / "t")
    write_draft(tmp_path / "d", **changes)
    fused = check_draft(tmp_path, target)
    norms = ["DraftInput"] if {"norm_before_fc", "fc_norm"} & set(changes) else []
    assert ops_of(fused.models["draft_fuse"]) == [*norms, "Linear"]
    assert sorted(ops_of(fused.models["draft"])) == sorted(ops)


@pytest.mark.parametrize("name", [*list(FURTHER)[:2], *slow(*list(FURTHER)[2:])])
def test_fused_drafts_with_additional_tensors(tmp_path: Path, name: str) -> None:
    target = write_target(tmp_path / "t")
    write_further_draft(tmp_path / "d", name)
    fused = check_draft(tmp_path, target)
    assert ops_of(fused.models["draft"]) == DRAFT


def test_the_fused_example_has_exactly_these_ops(tmp_path: Path) -> None:
    fused = fused_model(
        EXAMPLE / "target",
        EXAMPLE / "draft",
        backend="cuda",
        dump_passes=tmp_path,
        **EXAMPLE_LIMITS,
    )
    expected = ["Embed"]
    for layer in range(24):
        expected += [*LAYER, *["Capture"] * (layer in (1, 11, 20))]
    assert ops_of(fused.models["target"]) == [*expected, "RmsHead"]
    assert ops_of(fused.models["draft"]) == DRAFT
    assert ops_of(fused.models["draft_fuse"]) == ["Linear"]
    stages = {value.name for node in fused.models["target"].graph for value in node.outputs}
    assert {f"stage.layer.{layer}" for layer in range(24)} <= stages
    residuals = [node.inputs[3] for node in fused.models["draft"].graph if node.op_type == "Linear"]
    assert [value is not None for value in residuals] == [True, True]
    heads = [
        n for r in ("target", "draft") for n in fused.models[r].graph if n.op_type == "RmsHead"
    ]
    assert [head.attributes["rounding"].value for head in heads] == ["gpt_oss", "llama"]
    assert_types_and_axes_are_known(fused)
    (file,) = tmp_path.glob("target.*-only-known-ops.onnx")
    last = onnx.load(file, load_external_data=False)
    assert len(last.graph.node) == len(expected) + 1


def assert_types_and_axes_are_known(fused: FusedModel) -> None:
    """Assert that every value has a type, and only dynamic axes of the graph's inputs."""
    for role, model in fused.models.items():
        dynamic_sizes = {str(size) for port in model.graph.inputs for size in port.shape}
        for node in model.graph:
            for value in node.outputs:
                assert value.dtype is not None, (role, value.name)
                assert {
                    str(size) for size in value.shape if not isinstance(size, int)
                } <= dynamic_sizes


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "mixed"])
def test_stored_weights_have_the_types_of_kernels(tmp_path: Path, dtype: str) -> None:
    write_target(tmp_path / "t", layers=2, dtype="bf16" if dtype == "mixed" else dtype)
    write_draft(tmp_path / "d", target_layers=2, dtype="f16" if dtype == "mixed" else dtype)
    if dtype == "mixed":
        file = tmp_path / "t" / "model.safetensors"
        tensors = load_file(file)
        wide = ("norm", "q_proj", "sinks", "router")
        tensors = {n: t.float() if any(w in n for w in wide) else t for n, t in tensors.items()}
        save_file(tensors, file, metadata={"format": "pt"})
    fused = fused_model(tmp_path / "t", tmp_path / "d", max_batch_size=1)
    assert ops_of(fused.models["draft"]) == DRAFT
    assert Counter(ops_of(fused.models["target"]))["RmsMoe"] == 2
    for model in fused.models.values():
        for name, value in model.graph.initializers.items():
            in_fp32 = "sinks" in name or "rope" in name
            # Experts are packed bytes; the op's packing determines the type of their biases.
            if "experts" not in name or name.endswith("down_proj_bias"):
                expected = torch.float32 if in_fp32 else torch.bfloat16
                assert recipe_of(value).checked().dtype == expected, name
        floats = {port.dtype for port in model.graph.inputs} - {ir.DataType.INT32}
        assert floats == {ir.DataType.BFLOAT16}
    assert_types_and_axes_are_known(fused)


def test_a_tied_head_and_the_embedding_are_one_tensor(tmp_path: Path) -> None:
    changes = {"tie_word_embeddings": True}
    write_target(tmp_path / "t", layers=1, config_changes=changes)
    file = tmp_path / "t" / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    write_draft(tmp_path / "d", target_layers=1, aux_layers=(0,), draft_vocab=None)
    fused = fused_model(tmp_path / "t", tmp_path / "d")
    table = tensors["model.embed_tokens.weight"]
    packed = {}
    for role in ("target", "draft"):
        graph = fused.models[role].graph
        heads = [n.inputs[3] for n in graph if n.op_type == "RmsHead"]
        tables = [n.inputs[1] for n in graph if n.op_type in ("Embed", "DraftInput")]
        assert heads == tables and heads[0].name == "model.embed_tokens.packed"
        assert "model.embed_tokens.weight" not in graph.initializers
        packed[role] = recipe_of(heads[0])
        assert packed[role].sources == ("model.embed_tokens.weight",)
        assert torch.equal(unpack_rows(packed[role].checked()), table)
    assert packed["target"].describes(packed["draft"])


def test_a_draft_with_a_separate_head_reads_the_tied_embedding(tmp_path: Path) -> None:
    write_llama(tmp_path / "t", tie_word_embeddings=True, vocab_size=64)
    write_draft(tmp_path / "d", target_layers=3, target_vocab=64, draft_vocab=32, aux_layers=(0,))
    fused = fused_model(tmp_path / "t", tmp_path / "d", draft_only=True)
    (table,) = [n.inputs[1] for n in fused.models["draft"].graph if n.op_type == "DraftInput"]
    assert table.name == "model.embed_tokens.packed"


def unreadable(g: TargetGeometry) -> TargetCheckpoint:
    """Return a checkpoint of this geometry whose weights must not be loaded."""

    def load() -> torch.Tensor:
        raise AssertionError("a pass loads a weight")

    def source(name: str, dtype: str, shape: tuple[int, ...]) -> SourceTensor:
        return SourceTensor(name, dtype, shape, (name,), load, None, None)

    tensors = {
        name: source(name, tensor.dtypes[0], tensor.shape)
        for name, tensor in target_tensors(g).items()
    }
    return TargetCheckpoint(g, tensors, (), ())


def checkpoint_bytes(g: TargetGeometry) -> int:
    tensors = target_tensors(g).values()
    return sum(math.prod(t.shape) * {"U8": 1, "BF16": 2}[t.dtypes[0]] for t in tensors)


@pytest.mark.slow
def test_the_20b_geometry_is_fused_in_seconds_without_its_weights() -> None:
    g = GPT_OSS_20B
    require_cuda_support(g, None)
    engine_sizes = compute_engine_sizes(BuildOptions(model=Path("m"), output=Path("o")), g, None)
    model = graphs.target_graph(g, engine_sizes, (1, 11, 21), torch.bfloat16)
    WeightSources(unreadable(g), []).bind(model)
    start = time.perf_counter()
    run_passes("target", model, CUDA_PASSES, None)
    assert time.perf_counter() - start < 20
    assert Counter(ops_of(model)) == {
        "Embed": 1, "Capture": 3, "RmsHead": 1, **dict.fromkeys(LAYER, 24),
    }  # fmt: skip
    stored = sum(recipe_of(value).nbytes for value in model.graph.initializers.values())
    tables = 2 * model.graph.initializers["rope_cos"].const_value.nbytes
    # No tensor is stored twice, and packing adds little.
    assert 1 <= (stored - tables) / checkpoint_bytes(g) < 1.005


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"hidden": 2888}, ["hidden_size", "2888", "32"]),
        ({"head_dim": 40}, ["head_dim", "40", "16"]),
        ({"head_dim": 112}, ["64 query and 8 KV heads of 112", "16, 32, 64, 80, 96, 128"]),
        ({"kv_heads": 2}, ["64 query and 2 KV heads of 64", "up to 16 query heads"]),
    ],
)
def test_rejects_a_target_that_kernels_do_not_support(
    changes: dict[str, Any], names: list[str]
) -> None:
    with pytest.raises(SpecbuildError) as error:
        require_cuda_support(replace(GPT_OSS_20B, **changes), None)
    assert all(name in str(error.value) for name in names)


def test_rejects_a_draft_that_kernels_do_not_support(tmp_path: Path) -> None:
    write_target(tmp_path / "t")
    write_draft(tmp_path / "d", layers=2)
    target = read_target(tmp_path / "t", strict=True).geometry
    draft = read_draft(tmp_path / "d", target, strict=True).geometry
    with pytest.raises(SpecbuildError, match="has 2 layers"):
        require_cuda_support(target, draft)


def test_the_error_names_nodes_that_are_not_fused() -> None:
    b = BodyBuilder()
    x = ir.Value(name="x", shape=ir.Shape(["T"]), type=ir.TensorType(ir.DataType.FLOAT))
    y = b.Neg(x)
    y.name = "negated"
    model = ir.Model(ir.Graph([x], [y], nodes=b.nodes, opset_imports={"": 23}), ir_version=10)
    with pytest.raises(SpecbuildError, match=r"Neg \(x → negated\).*--backend cpu"):
        only_known_ops(model)
