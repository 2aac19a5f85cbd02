"""Refuses weights that are not finite, by the tensor's name, while they are streamed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from specbuild.builder.checkpoint.quantization.tensor import QuantizedTensor
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.runtime.errors import SpecbuildError

# The smallest 7-bit pattern that is not a number, by 8-bit type.
_FP8_LIMITS = {
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7C,
}
# MXFP4 stores a power of two for every block as a byte, under this name; the largest is NaN.
_SCALES, _NAN_SCALE = "_scales", 255
# Values that are checked together, so that temporaries stay in the processor's cache.
_PIECE = 1 << 20


def finite_tensors(tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """Return the same tensors; loading one raises SpecbuildError if it has NaN or infinity."""
    return {key: _checked(tensor) for key, tensor in tensors.items()}


def _checked(source: SourceTensor) -> SourceTensor:
    sound = False

    def check(tensor: torch.Tensor) -> None:
        problem = _problem(source.name, tensor)
        if problem is not None:
            where = "" if source.file is None else f"{source.file}: "
            raise SpecbuildError(
                f"{where}tensor {', '.join(source.sources)} {problem}; get the checkpoint "
                "anew, or build with --allow-nonfinite"
            )

    def checked(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal sound
        if not sound:
            check(tensor)
            sound = True
        return tensor

    load, load_as, quantized = source.load, source.load_as, source.quantized

    def checked_parts() -> QuantizedTensor:
        assert quantized is not None
        parts = quantized.load()
        for tensor in (parts.codes, parts.scales, parts.minima):
            if tensor is not None and tensor.is_floating_point():
                check(tensor)
        return parts

    return replace(
        source,
        load=lambda: checked(load()),
        load_as=None if load_as is None else lambda dtype: checked(load_as(dtype)),
        quantized=None if quantized is None else replace(quantized, load=checked_parts),
        experts=tuple(map(_checked, source.experts)),
    )


def _problem(name: str, tensor: torch.Tensor) -> str | None:
    if tensor.numel() == 0:
        return None
    if tensor.dtype == torch.uint8:
        if name.endswith(_SCALES) and int(tensor.max()) == _NAN_SCALE:
            return f"holds a scale of {_NAN_SCALE}, which is NaN in MXFP4"
        return None
    if not tensor.is_floating_point() or _is_finite(tensor):
        return None
    return "holds NaN or infinity"


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype.itemsize == 1:
        codes = tensor.view(torch.uint8).flatten()
        if tensor.dtype == torch.float8_e8m0fnu:
            return int(codes.max()) != _NAN_SCALE
        limit = _FP8_LIMITS[tensor.dtype]
        return all(int((piece & 0x7F).max()) < limit for piece in codes.split(_PIECE))
    # Both are NaN if any value is.
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
