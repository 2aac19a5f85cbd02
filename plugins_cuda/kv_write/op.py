"""KvWrite: write the new tokens' keys or values to their slots of a paged pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.kv_write.body import body
from specbuild.plugins_cuda.kv_write.codes import as_codes
from specbuild.plugins_cuda.kv_write.lowering import lower
from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import NoTraffic

if TYPE_CHECKING:
    import torch

POOL_AXES = ("pages", "kv_heads", "page_size", "width")
POOL_BODY_AXES = ("kv_heads", "pages", "page_size", "width")


def reference(pool: torch.Tensor, new: torch.Tensor, write_slot: torch.Tensor) -> torch.Tensor:
    """Return ``pool`` [pages, kv_heads, page_size, width] with ``new`` [T, kv_heads, width]
    written.

    Slot s is offset ``s % page_size`` of page ``s // page_size``. Padding rows have slots of page
    0, which is never read. A pool of uint8 is quantized (``codes.py``).
    """
    import torch

    page_size = pool.shape[2]
    slot = write_slot.long()
    out = pool.clone()
    written = as_codes(new) if pool.dtype == torch.uint8 else new
    out[slot // page_size, :, slot % page_size] = written
    return out


OP = OpSpec(
    name="KvWrite",
    doc="Writes the new tokens' keys, values or latents into their page slots.",
    inputs=(
        TensorSpec("pool", "C", POOL_AXES, body_axes=POOL_BODY_AXES),
        TensorSpec("new", "T", ("T", "kv_heads", "width")),
        TensorSpec("write_slot", "int32", ("T",)),
    ),
    outputs=(TensorSpec("pool_out", "C", POOL_AXES, body_axes=POOL_BODY_AXES),),
    attributes=(),
    aliases=(("pool_out", "pool"),),
    reference=reference,
    body=body,
    lower=lower,
    traffic=NoTraffic("writes the entries of its rows, and reads no others"),
)
