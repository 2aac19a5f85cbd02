"""CUDA engines with quantized values of a checkpoint have the bits of its bf16 engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from example_engine import every_other_sampled, on_gpu, outputs, random_prompts, records
from gguf_keys import write_gguf_experts, write_gguf_llama
from llama_checkpoints import LAYERS, VOCAB, write_llama
from quantized_checkpoints import write_quantized
from quantized_formats import FORMATS

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress

pytestmark = pytest.mark.timeout(600)

# Slices of K with one block and with three; neighbours share a unit of two.
HIDDEN, INNER, HEADS, TOKENS = 512, 1536, 8, 40
LENGTHS = (5, 230, 40, 17)
KINDS = (
    "Q4_0", "Q8_0", "Q4_K with Q6_K", "IQ4_XS with Q5_K", "Q4_K", "Q5_K", "Q6_K", "Q4_1", "Q5_0",
    "Q5_1", "IQ4_NL", "IQ4_XS", "Q3_K", "MXFP4", "NVFP4",
)  # fmt: skip
EXPERTS = (
    ("Q4_K", "Q6_K"),
    ("Q4_K", "Q4_K"),
    ("Q8_0", "Q8_0"),
    ("Q4_0", "Q5_0"),
    ("Q3_K", "Q4_K"),
    ("MXFP4", "MXFP4"),
    ("IQ4_XS", "Q5_1"),
    ("NVFP4", "NVFP4"),
)


@pytest.fixture(scope="module", params=KINDS)
def file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A Llama whose matrices, except the embedding, have one type, or two that share a launch."""
    folder = tmp_path_factory.mktemp("file")
    kind, _, values = request.param.partition(" with ")
    yield write_gguf_llama(
        folder, kind, values,
        hidden_size=HIDDEN, intermediate_size=INNER, head_dim=64, num_attention_heads=HEADS,
    )  # fmt: skip


def test_quantized_weights_have_the_bits_of_dequantized_ones(file: Path) -> None:
    require_bits_of_bf16(file, 7 * LAYERS + 1)


@pytest.mark.parametrize(
    "name",
    [
        "compressed-tensors nvfp4",
        "modelopt nvfp4",
        "awq",
        "gptq of 8 bits",
        "compressed-tensors w3a16",
        "fbgemm fp8",
    ],
)
def test_no_bit_of_safetensors_differs(name: str, tmp_path: Path) -> None:
    """compressed-tensors' NVFP4 divides by the scale of a tensor, ModelOpt's multiplies."""
    write_llama(
        tmp_path / "model", num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=INNER,
        head_dim=64, num_attention_heads=HEADS,
    )  # fmt: skip
    write_quantized(tmp_path, FORMATS[name])
    require_bits_of_bf16(tmp_path / "model", 7 * LAYERS)


@pytest.mark.parametrize("kinds", EXPERTS, ids=" ".join)
def test_quantized_experts_have_the_bits_of_dequantized_ones(
    kinds: tuple[str, str], tmp_path: Path
) -> None:
    """Gate and up have one type, down another; every tensor of experts is counted once a layer."""
    file = write_gguf_experts(
        tmp_path, *kinds, num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=512,
        moe_intermediate_size=768, num_experts=8, num_experts_per_tok=3, head_dim=64,
        num_attention_heads=HEADS,
    )  # fmt: skip
    require_bits_of_bf16(file, 3 * LAYERS)


def require_bits_of_bf16(file: Path, weights: int) -> None:
    """Assert that engines with quantized and with bf16 weights have equal records."""
    results = []
    for dtype in ("bf16", "checkpoint"):
        folder = file.parent / dtype
        options = BuildOptions.from_flat(
            model=file, output=folder, backend="cuda", max_batch_size=4, page_size=64,
            max_seq_len=512, weights_dtype=dtype,
        )  # fmt: skip
        build(options, SilentProgress())
        prompts, params = random_prompts(VOCAB, LENGTHS), every_other_sampled(len(LENGTHS), TOKENS)
        with on_gpu(folder) as engine:
            alone = outputs(records(engine, prompts[:1], params[:1]))
            results.append((alone, outputs(records(engine, prompts, params))))
            coded = engine.manifest.quantized
        if dtype == "checkpoint":
            assert coded is not None and coded.math == "bf16"
            assert {form.dequantized for form in coded.forms} == {None}
            assert sum(form.weights for form in coded.forms) == weights
    assert results[0] == results[1]
