"""The RMS norms of models, as the references of fused ops compute them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    import torch

# "gpt_oss": multiply by the weight in fp32, then cast; "llama": cast, then multiply by the weight.
# "offset": as "gpt_oss", with a stored weight w: multiply by 1 + w in fp32.
Rounding: TypeAlias = Literal["gpt_oss", "llama", "offset"]
ROUNDINGS: tuple[Rounding, ...] = ("gpt_oss", "llama", "offset")


def rounding_of(op: str, attributes: Mapping[str, object]) -> Rounding:
    """Return the rounding of an op's norm; SpecbuildError if the attribute is unknown."""
    for rounding in ROUNDINGS:
        if attributes["rounding"] == rounding:
            return rounding
    raise SpecbuildError(
        f"{op}: rounding {attributes['rounding']!r} is unknown, expected one of "
        f"{', '.join(ROUNDINGS)}; export the model again"
    )


def rounding_code(rounding: str) -> int:
    """Return the index of a rounding in kernels: ``NormRounding`` and ``Norm`` of ``_device/``."""
    return [str(name) for name in ROUNDINGS].index(rounding)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding | str
) -> torch.Tensor:
    """Return ``x`` [..., K] / its root mean square · ``weight`` [K], in the type of ``x``.

    ValueError for an unknown rounding.
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding {rounding!r} is none of {', '.join(ROUNDINGS)}")
    wide = x.float()
    normed = wide * (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    if rounding != "llama":
        offset = 1.0 if rounding == "offset" else 0.0
        return (normed * (offset + weight.float())).to(x.dtype)
    return (normed.to(x.dtype).float() * weight.float()).to(x.dtype)
