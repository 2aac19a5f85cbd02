"""The launch of ExtendInputs."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
)
from specbuild.runtime.engine_dir.plan import ITEM_BYTES
from specbuild.runtime.errors import SpecbuildError

_VECTOR_BYTES = 16
_POINTERS = (
    "length",
    "done",
    "pending_count",
    "pending_tokens",
    "pending_captured",
    "page_table",
    "mask_captured",
    "token_ids",
    "captured_rows",
    "positions",
    "row_start",
    "row_slot",
    "write_slot",
    "tree_start",
    "ancestor_bits",
    "logit_rows",
    "score",
)


def row_vectors(request: LoweringRequest, name: str) -> int:
    """Return the number of 16-byte vectors in a row (the last axis) of an activation.

    Raises SpecbuildError if the width of a row is no multiple of a vector.
    """
    info = request.tensors[name]
    nbytes = info.shape[-1] * ITEM_BYTES[info.dtype]
    if nbytes % _VECTOR_BYTES:
        raise SpecbuildError(
            f"{name} has rows of {nbytes} bytes, expected a multiple of {_VECTOR_BYTES}; make its "
            "width a multiple of 8"
        )
    return nbytes // _VECTOR_BYTES


def lower(request: LoweringRequest) -> Lowering:
    """Return a launch of one CTA per row of the bucket.

    Sizes are arguments, so that all buckets share a kernel.
    """
    batch, capacity, _ = request.tensors["pending_captured"].shape
    pages = request.tensors["page_table"].shape[1]
    masks, token = (int(request.attributes.get(name, 0)) for name in ("masks", "mask_token"))
    sizes = (batch, capacity, row_vectors(request, "pending_captured"), pages)
    launch = OpLaunch(
        kernel=Kernel("extend_inputs", "extend_inputs"),
        grid=(batch * (capacity + masks), 1, 1),
        block=256,
        shared_bytes=0,
        arguments=(*_POINTERS, *sizes, int(request.attributes["page_size"]), masks, token),
    )
    return Lowering((launch,))
