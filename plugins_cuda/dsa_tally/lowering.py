"""The launch of DsaTally."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch

_BLOCK = 128


def lower(request: LoweringRequest) -> Lowering:
    """Return a launch with one thread per sequence."""
    layers, batch = request.tensors["violations"].shape
    ring_entries, ring_batch = request.tensors["ring_broken"].shape
    launch = OpLaunch(
        kernel=Kernel("dsa_tally", "tally_lists"),
        grid=(-(-batch // _BLOCK), 1, 1),
        block=_BLOCK,
        shared_bytes=0,
        arguments=("violations", "step", "ring_broken", layers, batch, ring_entries, ring_batch),
    )
    return Lowering((launch,))
