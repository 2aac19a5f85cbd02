"""Experts of quantized checkpoints on CUDA: stored as quantized values, with the bits of bf16."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from emulation import has_compiler
from fused_graphs import PAGE, blank_pools, fused_model, launch_feeds, run_graph
from gguf_keys import write_gguf_experts
from left_out import slow
from llama_checkpoints import write_llama
from quantized_checkpoints import Format, fp8_scaled, write_quantized
from quantized_formats import FORMATS
from test_dense_invariance import normal, run

from specbuild.builder.graph.passes.weights import recipe_of
from specbuild.plugins_cuda.linear.storage import INT4_G32
from specbuild.plugins_cuda.registry import op_named
from specbuild.plugins_cuda.rms_moe.expert_codes import decoded_experts
from specbuild.plugins_cuda.rms_moe.packing import down_steps, gate_up_steps

EXPERTS, INNER, HIDDEN = 4, 256, 256
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": HIDDEN, "intermediate_size": 256, "head_dim": 64,
    "num_attention_heads": 4, "moe_intermediate_size": INNER, "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Kept:
    """The experts of a checkpoint: GGUF types or a format, and the storage of each matrix."""

    gate_up: str
    down: str
    source: tuple[str, ...]


BLOCKS_OF_128 = Format(
    {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    fp8_scaled(lambda shape: (shape[0] // 128, shape[1] // 128), "weight_scale_inv"),
)
CHECKPOINTS = {
    "Q4_K_M": Kept("q4_k", "q6_k", ("Q4_K", "Q6_K")),
    "Q4_K": Kept("q4_k", "q4_k", ("Q4_K", "Q4_K")),
    "Q5_K": Kept("q5_k", "q5_k", ("Q5_K", "Q5_K")),
    "Q8_0": Kept("q8", "q8", ("Q8_0", "Q8_0")),
    "Q4_0": Kept("int4-g32", "int4-g32", ("Q4_0", "Q4_0")),
    "Q3_K": Kept("q6_k", "q6_k", ("Q3_K", "Q3_K")),
    "IQ4_XS and Q5_1": Kept("iq4", "q5_1", ("IQ4_XS", "Q5_1")),
    "IQ4_NL": Kept("iq4", "iq4", ("IQ4_NL", "IQ4_NL")),
    "MXFP4": Kept("mxfp4", "mxfp4", ("MXFP4", "MXFP4")),
    "Q8_0 and F16": Kept("q8", "", ("Q8_0", "F16")),
    "awq": Kept("int4-g32", "int4-g32", ()),
    "fp8 blocks of 128": Kept("fp8-block", "fp8-block", ()),
    "fp8 a tensor": Kept("fp8-block", "fp8-block", ()),
    "fbgemm fp8": Kept("fp8-rows", "fp8-rows", ()),
    "compressed-tensors mxfp4": Kept("mxfp4", "mxfp4", ()),
    "compressed-tensors nvfp4": Kept("nvfp4", "nvfp4", ()),
    "NVFP4": Kept("nvfp4", "nvfp4", ("NVFP4", "NVFP4")),
    "gptq": Kept("int4-g32", "int4-g32", ()),
}
QUICK = ("Q4_K_M", "fp8 blocks of 128", "awq")
checkpoints = pytest.mark.parametrize("name", [*QUICK, *slow(*(set(CHECKPOINTS) - set(QUICK)))])


def write_checkpoint(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a small Qwen3 with experts, and the same values as plain weights."""
    kinds = CHECKPOINTS[name].source
    if not kinds:
        write_llama(folder / "model", "qwen3_moe", **SIZES)
        write_quantized(folder, BLOCKS_OF_128 if "128" in name else FORMATS[name])
        return folder / "model", folder / "plain"
    return write_gguf_experts(folder, *kinds, **SIZES), folder / "model"


def moe_inputs(model: ir.Model) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the weights of the first layer's experts, and the op's attributes."""
    node = next(node for node in model.graph if node.op_type == "RmsMoe")
    weights = {}
    for spec, value in zip(op_named("RmsMoe").inputs, node.inputs, strict=False):
        recipe = recipe_of(value)
        if recipe is not None:
            weights[spec.name] = recipe.checked()
    return weights, {name: value.value for name, value in node.attributes.items()}


@checkpoints
def test_routed_experts_are_stored_as_quantized_values(tmp_path: Path, name: str) -> None:
    """The logits equal those of the plain checkpoint, bit for bit."""
    expected, logits = CHECKPOINTS[name], []
    for path in write_checkpoint(tmp_path, name):
        fused = fused_model(path, max_seq_len=64, page_size=PAGE)
        model = fused.models["target"]
        if not logits:
            stored = {
                weight.name.rpartition(".")[2]
                for weight in model.graph.initializers.values()
                if weight.name and ".experts." in weight.name and weight.dtype == ir.DataType.UINT8
            }
            assert stored == {expected.gate_up, expected.down} - {""}
            assert not fused.kept.dequantized
        feeds = launch_feeds(model, range(20), torch.arange(20)) | blank_pools(model)
        feeds["token_ids"] = torch.arange(3, 23, dtype=torch.int32)
        logits.append(run_graph(model, feeds)["logits"])
    assert logits[0].isfinite().all()
    assert torch.equal(logits[0], logits[1])


def test_a_shared_expert_is_stored_as_quantized_values(tmp_path: Path) -> None:
    """The shared expert is packed after the routed ones, in their format."""
    sizes = SIZES | {"n_routed_experts": EXPERTS, "n_shared_experts": 1}
    del sizes["num_experts"]
    write_llama(tmp_path / "model", "glm4_moe", **sizes)
    write_quantized(tmp_path, FORMATS["awq"])
    weights = []
    for folder in ("model", "plain"):
        fused = fused_model(tmp_path / folder, max_seq_len=64, page_size=PAGE)
        weights.append(moe_inputs(fused.models["target"])[0])
        assert not fused.kept.dequantized
    coded, plain = weights
    storages = {"gate_up": (INNER // 8, gate_up_steps(HIDDEN)),
                "down": (HIDDEN // 8, down_steps(INNER))}  # fmt: skip
    for name, tiles in storages.items():
        assert len(coded[name]) == EXPERTS + 1
        assert torch.equal(decoded_experts(coded[name], *tiles, INT4_G32), plain[name])


@pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
@checkpoints
def test_kernels_of_quantized_experts_have_the_bits_of_bf16(tmp_path: Path, name: str) -> None:
    """Check launches of 1 to 64 rows, and of a prompt."""
    coded, plain = (
        moe_inputs(fused_model(path, max_seq_len=64, page_size=PAGE).models["target"])
        for path in write_checkpoint(tmp_path, name)
    )
    assert coded[0]["gate_up"].dtype == torch.uint8
    assert plain[0]["gate_up"].dtype == torch.bfloat16
    for rows, phase in ((1, "decode"), (3, "decode"), (17, "decode"), (64, "decode"),
                        (70, "prefill")):  # fmt: skip
        inputs = {
            "x": normal(rows, HIDDEN),
            "row_start": torch.tensor([0, rows], dtype=torch.int32),
        }
        result, expected = (
            run("RmsMoe", inputs | weights, {"y": normal(rows, HIDDEN)}, phase=phase, **attributes)
            for weights, attributes in (coded, plain)
        )
        np.testing.assert_array_equal(result["y"], expected["y"], err_msg=f"{rows} rows, {phase}")
