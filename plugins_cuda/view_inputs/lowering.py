"""The launch of ViewInputs."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.runtime.errors import SpecbuildError

_BLOCK = 128
MAX_SEQUENCES = 256
_POINTERS = (
    "token_ids",
    "positions",
    "ancestor_bits",
    "write_slot_full",
    "write_slot_sliding",
    "tree_count",
    "done",
    "full_step",
    "verified_len",
    "view_blocks",
    "budget",
    "buffered_tokens",
    "page_table_full",
    "page_table_sliding",
    "row_token_ids",
    "row_positions",
    "row_start",
    "row_slot",
    "view_slot",
    "tree_start",
    "view_start",
    "row_bits",
    "row_write_full",
    "row_write_sliding",
    "logit_rows",
    "fed_again",
    "viewed",
    "blocks",
)


def require_sequences(op: str, batch: int) -> None:
    """Raise SpecbuildError for more sequences than the kernel's row counts support."""
    if batch > MAX_SEQUENCES:
        raise SpecbuildError(
            f"{op}: got {batch} sequences, expected at most {MAX_SEQUENCES}; build with "
            "a smaller --max-batch-size"
        )


def lower(request: LoweringRequest) -> Lowering:
    """Return a launch with a thread per row; every CTA computes the sequences' first rows."""
    shapes = {name: info.shape for name, info in request.tensors.items()}
    rows, words = shapes["row_bits"]
    (batch,) = shapes["done"]
    require_sequences("ViewInputs", batch)
    sliding = shapes.get("page_table_sliding", (batch, 0))
    names = ("page_size", "block_size", "sink_tokens", "window_blocks", "threshold", "room")
    numbers = (
        batch,
        shapes["token_ids"][0] // batch,
        words,
        shapes["buffered_tokens"][1],
        shapes["page_table_full"][1],
        sliding[1],
        *(int(request.attributes[name]) for name in names),
    )
    launch = OpLaunch(
        kernel=Kernel("view_inputs", "view_inputs"),
        grid=(-(-rows // _BLOCK), 1, 1),
        block=_BLOCK,
        shared_bytes=0,
        arguments=(*_POINTERS, *numbers),
    )
    return Lowering((launch,))
