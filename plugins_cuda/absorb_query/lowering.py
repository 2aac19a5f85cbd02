"""AbsorbQuery on a GPU: a warp per 32 columns of a head's latent, one launch for all row counts."""

from __future__ import annotations

from specbuild.plugins_cuda.absorb_query.packing import COLUMNS
from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.plugins_cuda.linear.packing import BLOCK
from specbuild.runtime.errors import SpecbuildError

# With few rows, small CTAs spread the weight over as many multiprocessors as possible. With many
# rows, the warps of larger CTAs share the rows that they read.
_FEW_WARPS, _MANY_WARPS = 2, 8
_FEW_ROWS, _MANY_ROWS = 64, 128
# The registers of a lane suffice for the weights of 32 columns up to this size.
MAX_NOPE = 192
# Rows of heads are read in vectors of 16 bytes.
ROPE_STEP = 8


def lower(request: LoweringRequest) -> Lowering:
    """Return the launch; SpecbuildError for unsupported heads."""
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
            f"AbsorbQuery: got heads of {nope} values without RoPE and {rope} with it, and latents "
            f"of {rank}, expected multiples of {BLOCK} up to {MAX_NOPE}, of {ROPE_STEP}, and of "
            f"{COLUMNS}; build for the cpu backend"
        )
    if dtype != "bfloat16":
        raise SpecbuildError(
            f"AbsorbQuery: got {dtype}, expected bfloat16; build the engine in bfloat16"
        )
