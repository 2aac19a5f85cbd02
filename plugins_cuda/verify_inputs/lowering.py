"""The launch of VerifyInputs."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.runtime.errors import SpecbuildError

_BLOCK = 128
# The sequences whose first rows fit in shared memory.
MAX_SEQUENCES = 256
_POINTERS = (
    "tree_tokens",
    "depths",
    "tree_bits",
    "count",
    "length",
    "root",
    "done",
    "limit",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "page_table_full",
    "page_table_sliding",
    "page_table_latent",
    "page_table_latent_sliding",
    "page_table_indexer",
    "floor",
    "row_count",
    "token_ids",
    "positions",
    "row_start",
    "row_slot",
    "tree_start",
    "ancestor_bits",
    "write_slot_full",
    "write_slot_sliding",
    "write_slot_latent",
    "write_slot_latent_sliding",
    "write_slot_indexer",
    "logit_rows",
    "row_temperature",
    "row_top_k",
    "row_top_p",
    "row_seed",
    "tree_count",
    "row_floor",
)


def lower(request: LoweringRequest) -> Lowering:
    """Return a launch with one thread per row, and one more CTA for row_start.

    Sizes are arguments, so that buckets and trees share a kernel.
    """
    shapes = {name: info.shape for name, info in request.tensors.items()}
    rows, words = shapes["ancestor_bits"]
    (batch,) = shapes["length"]
    nodes = shapes["tree_tokens"][1] if "tree_tokens" in shapes else 1
    if batch > MAX_SEQUENCES:
        raise SpecbuildError(
            f"VerifyInputs: got {batch} sequences, expected at most {MAX_SEQUENCES}; build the "
            "engine for fewer"
        )
    pages = [
        shapes[name][1] if name in shapes else 0
        for name in _POINTERS
        if name.startswith("page_table_")
    ]
    page_size = int(request.attributes["page_size"])
    launch = OpLaunch(
        kernel=Kernel("verify_inputs", "verify_inputs"),
        grid=(-(-rows // _BLOCK) + 1, 1, 1),
        block=_BLOCK,
        shared_bytes=0,
        arguments=(*_POINTERS, batch, rows, nodes, words, *pages, page_size),
    )
    return Lowering((launch,))
