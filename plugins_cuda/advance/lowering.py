"""The launch of Advance."""

from __future__ import annotations

from specbuild.plugins_cuda.extend_inputs.lowering import row_vectors
from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Workspace,
)
from specbuild.runtime.engine_dir.plan import ITEM_BYTES
from specbuild.runtime.errors import SpecbuildError

_ARRIVED = "workspace_arrived"
_WARPS = 16
_POINTERS = (
    "choice",
    "logprob",
    "path",
    "accepted",
    "captured",
    "length",
    "root",
    "pending_count",
    "pending_tokens",
    "pending_captured",
    "done",
    "limit",
    "ignore_eos",
    "eos_ids",
    "step",
    "ring_tokens",
    "ring_logprobs",
    "ring_accepted",
    "ring_count",
    "ring_step",
    "changes",
    "marks",
    "row_start",
    _ARRIVED,
)


def lower(request: LoweringRequest) -> Lowering:
    """Return a launch: a CTA per row of aux hidden states that may become pending, or else one CTA.

    Without aux hidden states, a warp processes a sequence. Raises SpecbuildError if a path does not
    fit in the ring.
    """
    shapes = {name: info.shape for name, info in request.tensors.items()}
    extended = int(request.attributes["extended"])
    (rows,), (batch,) = shapes["choice"], shapes["length"]
    ring_entries, ring_batch, ring_width = shapes["ring_tokens"]
    path_width = shapes["path"][1] if "path" in shapes else 1
    gathers = "captured" in shapes and "pending_captured" in shapes
    capacity = shapes["pending_tokens"][1] if gathers else path_width
    if path_width > ring_width or batch > ring_batch:
        raise SpecbuildError(
            f"Advance: got paths of {path_width} slots in a batch of {batch}, but the ring holds "
            f"{ring_width} tokens of {ring_batch} sequences; build it for the deepest tree and the "
            "largest batch"
        )
    # The slots of an accepted path are anywhere among the rows of its tree.
    nodes = rows if "row_start" in shapes else rows // batch
    sizes = (batch, nodes, path_width)
    widths = (row_vectors(request, "captured") if gathers else 0, capacity)
    # One CTA moves rows within the pending buffer.
    copies = min(path_width, capacity) if extended else 1
    # Warps that process one sequence each, and the words that they stage.
    sequences, words = 1 if gathers else min(batch, _WARPS), 2 * nodes + path_width
    vocab = shapes["marks"][1] if "marks" in shapes else 0
    launch = OpLaunch(
        kernel=Kernel("advance", "advance_batch"),
        grid=(batch, copies, 1) if gathers else (1, 1, 1),
        block=32 * (_WARPS if gathers else sequences),
        shared_bytes=sequences * words * ITEM_BYTES["int32"],
        arguments=(
            *_POINTERS,
            *sizes,
            *widths,
            ring_entries,
            ring_batch,
            ring_width,
            extended,
            vocab,
        ),
    )
    arrived = (1 + batch) * ITEM_BYTES["int32"]
    return Lowering((launch,), (Workspace(_ARRIVED, arrived, zeroed=True),))
