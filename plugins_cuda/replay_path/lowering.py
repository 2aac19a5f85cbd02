"""ReplayPath on a GPU: a warp per sequence."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.runtime.errors import SpecbuildError


def lower(request: LoweringRequest) -> Lowering:
    """Return one launch; SpecbuildError if a path does not fit in the port."""
    shapes = {name: info.shape for name, info in request.tensors.items()}
    batch, kept = shapes["replay_path"]
    path = shapes["path"][1] if "path" in shapes else 1
    if path > kept:
        raise SpecbuildError(
            f"ReplayPath: got paths of {path} rows, expected at most {kept}; build it for the "
            "deepest draft"
        )
    constants = (("PATH", path), ("KEPT", kept), ("STORES", int(request.attributes["stores"])))
    launch = OpLaunch(
        Kernel("replay_path", "replay_path_of_rows", constants),
        grid=(batch, 1, 1),
        block=32,
        shared_bytes=0,
        arguments=("path", "accepted", "positions", "row_start", "replay_path", "replay_count"),
    )
    return Lowering((launch,))
