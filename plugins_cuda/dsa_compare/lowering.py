"""The launch of DsaCompare."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch

_BLOCK = 128
_POINTERS = (
    "sampled",
    "choice",
    "path",
    "accepted",
    "sampled_accepted",
    "violations",
    "step",
    "ring_checks",
)


def lower(request: LoweringRequest) -> Lowering:
    """Return a launch with one thread per sequence."""
    shapes = {name: info.shape for name, info in request.tensors.items()}
    (rows,), (layers, batch) = shapes["choice"], shapes["violations"]
    ring_entries, ring_batch, _ = shapes["ring_checks"]
    path_width = shapes["path"][1] if "path" in shapes else 1
    sizes = (batch, rows // batch, path_width, layers, ring_entries, ring_batch)
    launch = OpLaunch(
        kernel=Kernel("dsa_compare", "compare_choices"),
        grid=(-(-batch // _BLOCK), 1, 1),
        block=_BLOCK,
        shared_bytes=0,
        arguments=(*_POINTERS, *sizes),
    )
    return Lowering((launch,))
