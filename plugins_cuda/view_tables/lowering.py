"""The launch of ViewTables."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch

THREADS = 256


def lower(request: LoweringRequest) -> Lowering:
    """Return a launch with a CTA per sequence, KV head and layer."""
    layers, batch, heads, pages = request.tensors["view_tables"].shape
    _, bm, _, entries = request.tensors["partial_tables"].shape
    launch = OpLaunch(
        kernel=Kernel("view_tables", "view_tables", (("THREADS", THREADS),)),
        grid=(batch, heads, layers),
        block=THREADS,
        shared_bytes=0,
        arguments=("page_table", "partial_tables", "viewed", "view_tables", bm, pages, entries),
    )
    return Lowering((launch,))
