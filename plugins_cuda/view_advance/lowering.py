"""The launch of ViewAdvance."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch

_BLOCK = 128
_POINTERS = (
    "token_ids",
    "positions",
    "path",
    "length",
    "done",
    "fed_again",
    "blocks",
    "verified_len",
    "view_blocks",
    "summarised",
    "buffered_tokens",
)


def lower(request: LoweringRequest) -> Lowering:
    """Return a launch with one thread per sequence."""
    shapes = {name: info.shape for name, info in request.tensors.items()}
    batch, buffer = shapes["buffered_tokens"]
    depth = shapes["path"][1] if "path" in shapes else 1
    nodes = shapes["token_ids"][0] // batch
    launch = OpLaunch(
        kernel=Kernel("view_advance", "view_advance"),
        grid=(-(-batch // _BLOCK), 1, 1),
        block=_BLOCK,
        shared_bytes=0,
        arguments=(*_POINTERS, batch, nodes, depth, buffer),
    )
    return Lowering((launch,))
