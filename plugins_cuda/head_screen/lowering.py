"""HeadScreen on a GPU: bounds of all tiles from int8 weights, then logits of candidate tiles."""

from __future__ import annotations

from dataclasses import replace

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Tactic,
    Workspace,
)
from specbuild.plugins_cuda.linear.storage import INT8
from specbuild.plugins_cuda.rms_head.lowering import Head, head_streaming
from specbuild.runtime.errors import SpecbuildError

# Rows of one pass over the int8 weight. With more rows, HeadChoose reads as many bytes.
MAX_ROWS = 32
_UPPERS, _BEST, _KEYS = "workspace_uppers", "workspace_best", "workspace_keys"
_ARRIVED = "workspace_arrived"


def lower(request: LoweringRequest) -> Lowering:
    """Return the two launches; SpecbuildError for more than ``MAX_ROWS`` rows."""
    rows = request.tensors["logit_rows"].shape[0]
    if rows > MAX_ROWS:
        raise SpecbuildError(
            f"HeadScreen: got {rows} rows, expected at most {MAX_ROWS} (one pass over the int8 "
            "weight); use HeadChoose for more"
        )
    screen, exact = _screen(request), _exact(request)
    tiles = request.tensors["weight"].shape[0]
    ctas = exact.cut.grid[0]
    rest = ("temperature", "seed", "position", _UPPERS, _BEST)
    bounds = OpLaunch(
        Kernel("head_screen", "screen_tiles", screen.cut.constants, file="screen.cu"),
        grid=screen.cut.grid,
        block=screen.cut.block,
        shared_bytes=screen.cut.shared_bytes,
        arguments=("x", "logit_rows", "norm", "codes", "errors", *rest, rows),
    )
    choice = OpLaunch(
        Kernel(
            "head_screen",
            "choose_of_screened",
            (*exact.cut.constants, ("CTA_TILES", -(-tiles // ctas))),
        ),
        grid=exact.cut.grid,
        block=exact.cut.block,
        shared_bytes=exact.cut.shared_bytes,
        arguments=(
            "x", "logit_rows", "norm", "weight", *rest, _KEYS, _ARRIVED, "choice", "logprob", rows,
        ),
    )  # fmt: skip
    return Lowering(
        (bounds, choice),
        (
            Workspace(_UPPERS, 4 * rows * tiles),
            Workspace(_BEST, 4 * rows, zeroed=True),
            Workspace(_KEYS, 8 * rows, zeroed=True),
            Workspace(_ARRIVED, 4 * exact.cut.grid[1], zeroed=True),
        ),
    )


def tactics(_request: LoweringRequest) -> tuple[Tactic, ...]:
    """Return the numbers of int8 loads in flight."""
    return ({}, {"loads": 6})


def _screen(request: LoweringRequest) -> Head:
    codes = {**request.tensors, "weight": request.tensors["codes"]}
    return head_streaming("HeadScreen", replace(request, tensors=codes), storage=INT8)


def _exact(request: LoweringRequest) -> Head:
    """Return the launch sizes with which HeadChoose reads the weight, so that logits are equal."""
    return head_streaming("HeadScreen", replace(request, tactic={"panels": 0}))
