"""AbsorbQuery on a GPU: a warp for 32 columns of a head's latent, one launch for any rows."""

from __future__ import annotations

from specbuild.plugins_cuda.absorb_query.packing import COLUMNS
from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.plugins_cuda.linear.packing import BLOCK
from specbuild.runtime.errors import SpecbuildError

# Of few rows a weight is on its way to as many multiprocessors as there are columns for; of many a
# CTA's warps share the rows that they read.
_FEW_WARPS, _MANY_WARPS = 2, 8
_FEW_ROWS, _MANY_ROWS = 64, 128
# Weights of 32 columns that a lane has registers for.
MAX_NOPE = 192
# Rows of heads are read by 16 bytes.
ROPE_STEP = 8


def lower(request: LoweringRequest) -> Lowering:
    """The launch; SpecbuildError for heads that it does not multiply."""
    tensors = request.tensors
    heads, entry = (int(request.attributes[name]) for name in ("q_heads", "entry"))
    rows, width = tensors["q"].shape
    rope = 2 * tensors["cos"].shape[1]
    nope, rank = width // heads - rope, tensors["weight"].shape[0] * 16 // heads
    _require(nope, rope, rank, tensors["q"].dtype)
    prompt = request.phase == "prefill"
    warps = min(_MANY_WARPS if prompt else _FEW_WARPS, rank // COLUMNS)
    rows_of_cta = _MANY_ROWS if prompt else _FEW_ROWS
    constants = (
        ("Q_HEADS", heads),
        ("NOPE", nope),
        ("ROPE", rope),
        ("RANK", rank),
        ("ENTRY", entry),
        ("WARPS", warps),
        ("ROWS_OF_CTA", rows_of_cta),
    )
    launch = OpLaunch(
        Kernel("absorb_query", "absorb_query", constants),
        grid=(-(-rank // (COLUMNS * warps)) + 1, heads, -(-rows // rows_of_cta)),
        block=32 * warps,
        shared_bytes=0,
        arguments=("q", "weight", "cos", "sin", "positions", "absorbed", rows),
        triggers_late=True,
    )
    return Lowering((launch,))


def _require(nope: int, rope: int, rank: int, dtype: str) -> None:
    if nope % BLOCK or not 0 < nope <= MAX_NOPE or rope % ROPE_STEP or rank % COLUMNS:
        raise SpecbuildError(
            f"AbsorbQuery: heads of {nope} values without rotation and {rope} with it, latents of "
            f"{rank}; its kernel takes multiples of {BLOCK} up to {MAX_NOPE}, of {ROPE_STEP}, and "
            f"of {COLUMNS}: build for the cpu target."
        )
    if dtype != "bfloat16":
        raise SpecbuildError(
            f"AbsorbQuery: its kernel takes bfloat16, got {dtype}: build the engine in bfloat16."
        )
