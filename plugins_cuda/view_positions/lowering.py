"""The launch of ViewPositions."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch, Workspace

THREADS = 1024


def lower(request: LoweringRequest) -> Lowering:
    """Return a launch with a CTA per sequence and layer."""
    layers, batch, heads, pages = request.tensors["view_tables"].shape
    page_size, pool_pages = (int(request.attributes[name]) for name in ("page_size", "pages"))
    launch = OpLaunch(
        kernel=Kernel("view_positions", "view_positions", (("THREADS", THREADS),)),
        grid=(batch, layers, 1),
        block=THREADS,
        shared_bytes=0,
        arguments=(
            *("page_table", "view_tables", "page_position", "workspace_begins"),
            *(heads, pages, page_size),
        ),
    )
    return Lowering((launch,), (Workspace("workspace_begins", 4 * pool_pages),))
