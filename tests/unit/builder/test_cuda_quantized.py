"""CUDA graphs of quantized checkpoints: bf16 weights equal the dequantized values."""

from __future__ import annotations

import json
from pathlib import Path

import gguf_models
import onnx_ir as ir
import pytest
import torch
from fused_graphs import PAGE, blank_pools, fused_model, launch_feeds, run_graph
from gguf_files import write_gguf
from gguf_keys import LLAMA_KEYS, LLAMA_KINDS, write_gguf_llama
from gguf_models import llama_twin
from left_out import slow
from llama_checkpoints import LAYERS, write_llama
from quantized_checkpoints import write_quantized
from quantized_formats import FORMATS

from specbuild.builder.backends.cuda.check import require_cuda_support
from specbuild.builder.graph.passes.weights import recipe_of
from specbuild.plugins_cuda.linear.block_scaled import decoded
from specbuild.plugins_cuda.linear.packing import BLOCK

QUICK = ("fp8 blocks", "compressed-tensors nvfp4", "gptq, ordered", "bitsandbytes nf4, twice")

GGUF_TYPES = (
    "Q5_1", "IQ4_XS", "IQ4_XS with Q5_K", "Q4_K with Q8_0", "NVFP4", "IQ4_NL", "Q4_0", "Q4_1",
    "Q5_0", "Q8_0", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4",
)  # fmt: skip

# The storage in which weights of layers stay quantized, or the reason why they do not.
STORED = {
    "awq": "int4-g32",
    "gptq of 3 bits": "int4-g32",
    "gptq of 8 bits": "mixed",
    "fp8 a tensor": "fp8-block",
    "fbgemm fp8": "fp8-rows",
    "gptq, ordered": "its groups are not consecutive columns",
    "compressed-tensors mxfp4": "mxfp4",
    "compressed-tensors mxfp8": "fp8",
    "compressed-tensors nvfp4": "nvfp4",
    "modelopt nvfp4": "nvfp4",
    "bitsandbytes nf4": "no kernel dequantizes its format",
}


@pytest.mark.parametrize("name", STORED)
def test_layers_stay_quantized_if_kernels_decode_the_format(tmp_path: Path, name: str) -> None:
    write_llama(tmp_path / "model", num_hidden_layers=2)
    write_quantized(tmp_path, FORMATS[name])
    kept = fused_model(tmp_path / "model", max_seq_len=64, page_size=PAGE).kept
    result = {storage.name: len(weights) for (_, storage), weights in kept.stored.items()}
    result |= {reason: len(weights) for (_, reason), weights in kept.dequantized.items()}
    assert result == {STORED[name]: 14}
    record = kept.record([])
    assert record is not None and record.math == "bf16"
    assert [form.weights for form in record.forms] == [14]


def test_a_type_without_a_kernel_is_dequantized_and_named(tmp_path: Path) -> None:
    file = write_gguf_llama(
        tmp_path, "Q2_K", hidden_size=256, intermediate_size=256, head_dim=64, num_attention_heads=4
    )
    record = fused_model(file, max_seq_len=64, page_size=PAGE).kept.record([])
    assert record is not None
    (form,) = record.forms
    assert (form.type, form.weights) == ("Q2_K", 7 * LAYERS + 1)
    assert form.dequantized == "no kernel dequantizes its format"


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "F16"])
def test_a_shared_expert_of_another_type_leaves_routed_ones_as_they_are(
    tmp_path: Path, kind: str
) -> None:
    """Joined with them it would have their storage, and they the storage that fits both."""
    sizes = {
        "hidden_size": 256, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip
    write_llama(tmp_path / "model", "qwen3_5_moe_text", rope_parameters=None, **sizes)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    architecture, keys = LLAMA_KINDS["qwen3_5_moe_text"]
    keys = LLAMA_KEYS | keys | {
        ".embedding_length": 256, ".expert_feed_forward_length": 256,
        ".expert_shared_feed_forward_length": 256, ".ssm.state_size": 16, ".ssm.inner_size": 64,
    }  # fmt: skip

    def kinds(name: str, _shape: tuple[int, ...]) -> str:
        return "Q4_K" if "exps" in name else kind if "shared_expert." in name else "F32"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_models, "mixed", kinds)
        tensors = llama_twin(tmp_path / "model", config)
    file = write_gguf(tmp_path / "model.gguf", architecture, keys, tensors)
    fused = fused_model(file, max_seq_len=64, page_size=PAGE)
    stored = {(kind, storage.name) for kind, storage in fused.kept.stored}
    assert stored == {("Q4_K", "q4_k")} | ({("Q8_0", "q8")} if kind == "Q8_0" else set())
    experts = [node for node in fused.models["target"].graph if node.op_type == "RmsMoe"]
    assert {node.attributes["shared"].value for node in experts} == {int(kind == "Q4_K")}


@pytest.mark.parametrize("values", ["Q6_K", "Q4_K", "IQ4_XS", "F16"])
def test_types_in_one_launch_are_stored_as_one_type(tmp_path: Path, values: str) -> None:
    """Queries and keys are Q4_K and values another type, as in files of llama.cpp."""
    write_llama(
        tmp_path / "model", num_hidden_layers=2, hidden_size=256, intermediate_size=512,
        head_dim=64, num_attention_heads=4, rope_parameters=None,
    )  # fmt: skip
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    architecture, keys = LLAMA_KINDS["llama"]
    keys = LLAMA_KEYS | keys | {
        ".embedding_length": 256, ".feed_forward_length": 512, ".rope.dimension_count": 64,
        ".attention.head_count": 4, ".block_count": 2,
    }  # fmt: skip

    def kinds(name: str, shape: tuple[int, ...]) -> str:
        if len(shape) != 2 or "embed_tokens" in name:
            return "F32"
        return values if "v_proj" in name else "Q4_K"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_models, "mixed", kinds)
        tensors = llama_twin(tmp_path / "model", config)
    file = write_gguf(tmp_path / "model.gguf", architecture, keys, tensors)
    kept = fused_model(file, max_seq_len=64, page_size=PAGE).kept
    stored = {(kind, storage.name): len(of) for (kind, storage), of in kept.stored.items()}
    of_layers = {("Q4_K", "q4_k"): 2 * 4 + 1}
    assert (
        stored
        == {
            "Q6_K": of_layers | {("Q4_K", "k-mixed"): 4, ("Q6_K", "k-mixed"): 2},
            "Q4_K": {("Q4_K", "q4_k"): 2 * 7 + 1},
            "IQ4_XS": of_layers | {("Q4_K", "mixed"): 4, ("IQ4_XS", "mixed"): 2},
            "F16": of_layers,
        }[values]
    )
    reason = "it shares a launch with weights of another type: one is not quantized"
    lost = {("Q4_K", reason): 4} if values == "F16" else {}
    assert {key: len(of) for key, of in kept.dequantized.items()} == lost


@pytest.mark.parametrize("kind", [*GGUF_TYPES[:3], *slow(*GGUF_TYPES[3:])])
def test_packed_codes_have_the_values_of_gguf_py(tmp_path: Path, kind: str) -> None:
    kind, _, values = kind.partition(" with ")
    file = write_gguf_llama(
        tmp_path, kind, values,
        hidden_size=256, intermediate_size=512, head_dim=64, num_attention_heads=4,
    )  # fmt: skip
    # The same numbers, dequantized by gguf-py, in safetensors.
    assert equal_weights(file, tmp_path / "model") == 4 * LAYERS + 1


@pytest.mark.parametrize(
    "name", ["compressed-tensors nvfp4", "gptq of 8 bits", *slow("modelopt nvfp4", "awq")]
)
def test_packed_codes_have_the_values_of_the_formats_library(tmp_path: Path, name: str) -> None:
    write_llama(tmp_path / "model", num_hidden_layers=2)
    write_quantized(tmp_path, FORMATS[name])
    assert equal_weights(tmp_path / "model", tmp_path / "plain") == 4 * 2


def equal_weights(quantized: Path, dequantized: Path) -> int:
    """Compare packed quantized weights with those of the other checkpoint; return their number."""
    coded, plain = (
        fused_model(path, max_seq_len=64, page_size=PAGE).models["target"].graph.initializers
        for path in (quantized, dequantized)
    )
    compared = 0
    for name, value in coded.items():
        recipe = recipe_of(value)
        if recipe is None or value.dtype != ir.DataType.UINT8:
            continue
        expected = recipe_of(plain[name.rpartition(".")[0]])
        assert expected is not None
        values = decoded(recipe.checked(), expected.shape[1] * BLOCK)
        assert torch.equal(values, expected.checked().bfloat16()), name
        compared += 1
    return compared


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_stays_quantized_and_is_stored_once(tmp_path: Path, tied: bool) -> None:
    write_llama(
        tmp_path / "model", num_hidden_layers=2, tie_word_embeddings=tied, rope_parameters=None
    )
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    architecture, keys = LLAMA_KINDS["llama"]
    keys = LLAMA_KEYS | keys | {".block_count": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_models, "mixed", lambda _, shape: "Q8_0" if len(shape) == 2 else "F32")
        tensors = llama_twin(tmp_path / "model", config)
    file = write_gguf(tmp_path / "model.gguf", architecture, keys, tensors)
    fused = fused_model(file, max_seq_len=64, page_size=PAGE)
    nodes = {node.op_type: node for node in fused.models["target"].graph}
    tables = [nodes["Embed"].inputs[1], nodes["RmsHead"].inputs[3]]
    assert [None if t is None else t.dtype for t in tables] == [ir.DataType.UINT8] * 2
    assert (tables[0] is tables[1]) == tied
    assert not fused.kept.dequantized
    assert sum(map(len, fused.kept.stored.values())) == 2 * 7 + 2 - tied
    stored = [name for name in fused.models["target"].graph.initializers if "embed" in name]
    assert len(stored) == 1, stored


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in FORMATS if name not in QUICK))])
def test_logits_equal_those_of_the_dequantized_checkpoint(tmp_path: Path, name: str) -> None:
    """Equal weights give equal results, bit for bit."""
    write_llama(tmp_path / "model", num_hidden_layers=2)
    write_quantized(tmp_path, FORMATS[name])
    logits = []
    for folder in ("model", "plain"):
        fused = fused_model(tmp_path / folder, max_seq_len=64, page_size=PAGE)
        require_cuda_support(fused.target.geometry, None)
        model = fused.models["target"]
        feeds = launch_feeds(model, range(20), torch.arange(20)) | blank_pools(model)
        feeds["token_ids"] = torch.arange(3, 23, dtype=torch.int32)
        logits.append(run_graph(model, feeds)["logits"])
    assert logits[0].isfinite().all()
    assert torch.equal(logits[0], logits[1])
