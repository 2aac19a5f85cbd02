"""The numbers of a tensor of a GGUF file, read piece by piece."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from specbuild.builder.checkpoint.gguf.block_types import BlockType
from specbuild.builder.checkpoint.gguf.blocks import (
    STEP_ELEMENTS,
    Bytes,
    block_layout,
    dequantise,
    is_quantised,
)
from specbuild.builder.checkpoint.gguf.container import GgufTensor
from specbuild.builder.checkpoint.quantization.tensor import (
    QuantizedForm,
    QuantizedTensor,
    ScaleFactors,
)
from specbuild.runtime.errors import SpecbuildError

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What one thread reads and takes apart at a time.
_PIECE_ELEMENTS = 1 << 20


def stored_dtype(tensor: GgufTensor) -> str:
    """The type of its numbers, spelled as in safetensors: its own, or F32 where it is quantised."""
    return "F32" if is_quantised(tensor.kind.name) else tensor.kind.name


def read_values(tensor: GgufTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The tensor in ``dtype``, by default its :func:`stored_dtype`.

    Quantised numbers are made float32 first, and then rounded. Raises SpecbuildError where the
    file cannot be read any more.
    """
    name = tensor.kind.name
    if not is_quantised(name):
        raw = torch.from_numpy(_read(tensor, 0, tensor.nbytes))
        plain = raw.view(PLAIN[name]).view(tensor.shape)
        return plain if dtype is None else plain.to(dtype)
    values = _new(tensor.shape, dtype or torch.float32)
    by_block = values.view(-1, tensor.kind.elements)

    def fill(piece: tuple[int, int]) -> None:
        first, stop = piece
        raw = _blocks(tensor, first, stop)
        out = by_block[first:stop]
        if out.dtype == torch.float32:
            dequantise(name, raw, out.numpy())
            return
        step = STEP_ELEMENTS // out.shape[1]
        exact = np.empty((min(step, len(raw)), out.shape[1]), np.float32)
        for start in range(0, len(raw), step):
            rows = raw[start : start + step]
            dequantise(name, rows, exact[: len(rows)])
            out[start : start + step].copy_(torch.from_numpy(exact[: len(rows)]))

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for _ in pool.map(fill, _pieces(tensor)):
            pass
    return values


def read_quantized(tensor: GgufTensor) -> QuantizedTensor:
    """The codes, scales and minima of a quantized matrix.

    Raises SpecbuildError where the file cannot be read any more.
    """
    layout = block_layout(tensor.kind.name)
    assert layout is not None
    raw = _blocks(tensor, 0, tensor.nbytes // tensor.kind.nbytes)
    with np.errstate(all="ignore"):  # a scale that is no number is refused where it is used
        codes, scales, minima = layout.unpack(raw)
    rows = tensor.shape[0]
    return QuantizedTensor(
        quantized_form(tensor),
        torch.from_numpy(codes).reshape(rows, -1),
        torch.from_numpy(scales).reshape(rows, -1),
        None if minima is None else torch.from_numpy(minima).reshape(rows, -1),
        factors=None if layout.factors is None else _factors(tensor, *layout.factors(raw)),
    )


def _factors(tensor: GgufTensor, *parts: np.ndarray | None) -> ScaleFactors:
    rows = tensor.shape[0]
    of_rows = [None if p is None else torch.from_numpy(p.copy()).reshape(rows, -1) for p in parts]
    block_scales, group_scales, block_minima, group_minima = of_rows
    assert block_scales is not None and group_scales is not None
    return ScaleFactors(
        tensor.kind.elements, block_scales, group_scales, block_minima, group_minima
    )


def quantized_form(tensor: GgufTensor) -> QuantizedForm:
    """What is known of a quantized matrix before it is read."""
    layout = block_layout(tensor.kind.name)
    assert layout is not None
    return QuantizedForm(
        tensor.kind.name,
        layout.code_type,
        layout.bits,
        (1, layout.group),
        tensor.nbytes,
        has_minima=layout.has_minima,
        scale_dtype=scale_dtype(tensor.kind),
        has_factors=layout.factors is not None,
    )


def scale_dtype(kind: BlockType) -> str:
    """The type that the scales of a quantised type are numbers of: fp16 where a block has one."""
    layout = block_layout(kind.name)
    assert layout is not None
    if kind.name == "MXFP4":
        return "F8_E8M0"
    is_stored = layout.group == kind.elements and layout.code_type != "e2m1"
    return "F16" if is_stored else "F32"


def read_blocks(tensor: GgufTensor) -> Bytes:
    """The raw blocks of a quantised tensor, u8 [rows, blocks of a row, bytes]."""
    raw = _read(tensor, 0, tensor.nbytes)
    return raw.reshape(-1, tensor.shape[-1] // tensor.kind.elements, tensor.kind.nbytes)


def part(tensor: GgufTensor, index: int) -> GgufTensor:
    """The tensor at ``index`` of the first axis."""
    nbytes = tensor.nbytes // tensor.shape[0]
    return replace(
        tensor,
        shape=tensor.shape[1:],
        offset=tensor.offset + index * nbytes,
        nbytes=nbytes,
    )


def _new(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory of numpy's, which asks for large pages: first touched, it is three times as fast."""
    raw = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def _pieces(tensor: GgufTensor) -> Iterator[tuple[int, int]]:
    blocks = tensor.nbytes // tensor.kind.nbytes
    step = _PIECE_ELEMENTS // tensor.kind.elements
    return ((first, min(first + step, blocks)) for first in range(0, blocks, step))


def _blocks(tensor: GgufTensor, first: int, stop: int) -> Bytes:
    size = tensor.kind.nbytes
    return _read(tensor, first * size, (stop - first) * size).reshape(-1, size)


def _read(tensor: GgufTensor, start: int, nbytes: int) -> Bytes:
    try:
        raw = np.fromfile(tensor.file, np.uint8, nbytes, offset=tensor.offset + start)
    except OSError as error:
        raise SpecbuildError(
            f"{tensor.file}: {tensor.name} cannot be read ({error.strerror})"
        ) from None
    if len(raw) != nbytes:
        raise SpecbuildError(f"{tensor.file}: became shorter while {tensor.name} was read")
    return raw
