"""``--weights-dtype fp8`` and ``mxfp4`` are refused if a checkpoint is quantized already."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_keys import write_gguf_llama
from left_out import slow
from llama_checkpoints import write_llama
from quantized_checkpoints import write_quantized
from quantized_formats import FORMATS

from specbuild.builder.build import build
from specbuild.builder.checkpoint.gguf.block_types import READ
from specbuild.builder.checkpoint.gguf.blocks import is_quantised
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.errors import SpecbuildError

# What errors call the weights of each format.
TYPES = {
    "fp8 blocks": "fp8 16x32",
    "fp8 blocks, bf16 scales": "fp8 16x32",
    "fp8 blocks, e8m0 scales": "fp8 16x32",
    "fp8 a tensor": "fp8 tensor",
    "fbgemm fp8": "fp8 channel",
    "compressed-tensors fp8 dynamic": "fp8 channel",
    "compressed-tensors fp8 blocks": "fp8 16x32",
    "compressed-tensors mxfp8": "fp8 g32",
    "compressed-tensors w8a8": "int8 channel",
    "compressed-tensors w4a16": "int4 g32",
    "compressed-tensors w4a16 with zero points": "int4 g32",
    "compressed-tensors w4a16, ordered": "int4 g32",
    "compressed-tensors w3a16": "int3 channel",
    "compressed-tensors nvfp4": "nvfp4",
    "compressed-tensors mxfp4": "mxfp4",
    "awq": "int4 g32",
    "gptq": "int4 g32",
    "gptq, ordered": "int4 g32",
    "gptq of 3 bits": "int3 g32",
    "gptq of 8 bits": "int8 g32",
    "gptq version 2 of 8 bits, ordered": "int8 g32",
    "modelopt fp8": "fp8 tensor",
    "modelopt nvfp4": "nvfp4",
    "bitsandbytes nf4": "nf4",
    "bitsandbytes nf4, twice": "nf4",
}
QUICK = ("fp8 blocks", "compressed-tensors nvfp4", "awq", "bitsandbytes nf4")
GGUF_TYPES = [kind.name for kind in READ.values() if is_quantised(kind.name)]


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in FORMATS if name not in QUICK))])
def test_formats_of_safetensors_are_refused(tmp_path: Path, name: str) -> None:
    write_llama(tmp_path / "model", num_hidden_layers=1)
    write_quantized(tmp_path, FORMATS[name])
    require_refusals(tmp_path / "model", TYPES[name])


@pytest.mark.parametrize("kind", [*GGUF_TYPES[:1], *slow(*GGUF_TYPES[1:])])
def test_types_of_gguf_are_refused(tmp_path: Path, kind: str) -> None:
    file = write_gguf_llama(
        tmp_path, kind, hidden_size=256, intermediate_size=256, head_dim=64, num_attention_heads=4
    )
    require_refusals(file, kind)


def require_refusals(model: Path, kind: str) -> None:
    """Both types are refused with the name of a weight and its type, and nothing is written."""
    for dtype in ("fp8", "mxfp4"):
        output = model.parent / "engine"
        options = BuildOptions.from_flat(
            model=model, output=output, backend="cuda", weights_dtype=dtype
        )
        with pytest.raises(SpecbuildError) as error:
            build(options, SilentProgress())
        assert f"--weights-dtype {dtype}: the checkpoint is quantized already" in str(error.value)
        assert f".weight is {kind})" in str(error.value)
        assert not output.exists()
