"""Write the table of docs/quantised-checkpoints.md: each format, and what engines make of it.

.venv/bin/python docs/write_quantised.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from generated_tables import markdown_table, replace_table

from specbuild.builder.backends.cuda.fusions.checkpoint_weights import (
    block_scaled_storage,
    code_form,
)
from specbuild.builder.checkpoint.gguf.block_types import READ, BlockType
from specbuild.builder.checkpoint.gguf.blocks import is_quantised
from specbuild.builder.checkpoint.gguf.container import GgufTensor
from specbuild.builder.checkpoint.gguf.values import quantized_form
from specbuild.builder.checkpoint.quantization.registry import FORMATS
from specbuild.plugins_cuda.linear.group_codes import code_storage

PAGE = Path(__file__).with_name("quantised-checkpoints.md")
HEADER = ("checkpoint", "stored as", "bits per weight", "CPU", "CUDA")
# CPU engines have products with integer codes only.
FLOATS = ("FP8", "float8", "nf4")
# A row of whole blocks of every type.
_COLUMNS = 4096


def on_cpu(stored: str) -> str:
    """How a CPU engine stores what the table calls ``stored``."""
    if "MXFP8" in stored:
        return "codes; MXFP8 fp32"
    return "fp32" if any(name in stored for name in FLOATS) else "codes"


def on_cuda(stored: str) -> str:
    """How a CUDA engine stores what the table calls ``stored``, of safetensors."""
    if "MXFP8" in stored:
        return "codes"
    if "order" in stored or "desc_act" in stored:
        return "codes; bf16 if groups are not consecutive columns"
    kept = ("FP8", "float8", "W8A8", "NVFP4", "int4")
    return "codes" if any(name in stored for name in kept) else "bf16"


def on_cuda_of_gguf(kind: BlockType) -> str:
    """How a CUDA engine stores a type of GGUF."""
    form = quantized_form(GgufTensor(kind.name, (1, _COLUMNS), kind, Path(), 0, 0))
    forms = {code_form(form)}
    return "codes" if block_scaled_storage(forms) or code_storage(forms, _COLUMNS) else "bf16"


def rows() -> Iterator[tuple[str, ...]]:
    """The cells of each format, safetensors first."""
    for known in FORMATS:
        for stored, bits in known.stored.items():
            methods = ", ".join(f"`{method}`" for method in known.methods)
            yield methods, stored, bits, on_cpu(stored), on_cuda(stored)
    for kind in READ.values():
        if is_quantised(kind.name):
            bits = f"{8 * kind.nbytes / kind.elements:g}"
            yield "GGUF", kind.name, bits, on_cpu(kind.name), on_cuda_of_gguf(kind)
    yield "`mxfp4` and GGUF", "experts of GPT-OSS", "4.25", "fp32", "the stored values"


def table() -> str:
    """Return the table as Markdown."""
    return markdown_table(HEADER, rows())


def page(text: str) -> str:
    """Return the page with the table replaced."""
    return replace_table(text, "formats", table())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
