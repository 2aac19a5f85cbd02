"""The launch of RmsLowRank that norms and rotates what was projected, and writes cache entries."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.plugins_cuda.launches import Kernel, LoweringRequest, OpLaunch, Workspace
from specbuild.plugins_cuda.linear.packing import TILE_ROWS
from specbuild.plugins_cuda.linear.streaming import normed_bytes
from specbuild.runtime.errors import SpecbuildError

PROJECTED = "workspace_projected"
_MAX_WARPS, _PIECE = 16, 256
_VECTOR = 8


@dataclass(frozen=True)
class Parts:
    """Values of a projected row: of queries, of the latent, of the rotated key; and of an entry."""

    query: int
    rank: int
    rope: int
    entry: int
    query_norm: bool

    @property
    def normed(self) -> int:
        """The widest part that is normed."""
        return max(self.rank, self.query if self.query_norm else 0)


def parts_of(request: LoweringRequest) -> Parts:
    """The parts; SpecbuildError where the pool does not hold them in 16-byte vectors."""
    tensors = request.tensors
    rank, rope = tensors["latent_norm"].shape[0], 2 * tensors["cos"].shape[1]
    query = tensors["weight"].shape[0] * TILE_ROWS - rank - rope
    entry, dtype = tensors["c_pool"].shape[3], tensors["c_pool"].dtype
    held = entry >= rank + rope and not any(size % _VECTOR for size in (query, rank, entry))
    if not held or dtype != "bfloat16":
        raise SpecbuildError(
            f"RmsLowRank: cache entries of {entry} {dtype} values for latents of {rank} and keys "
            f"of {rope}, behind {query} of queries; its kernel takes bfloat16 and multiples of "
            f"{_VECTOR}: build for the cpu target."
        )
    return Parts(query, rank, rope, entry, "q_norm" in tensors)


def entry_constants(request: LoweringRequest) -> tuple[tuple[str, int | float], ...]:
    """What the launch is compiled with; see ``device/entries.cuh``."""
    parts = parts_of(request)
    return (
        ("QUERY", parts.query),
        ("RANK", parts.rank),
        ("ROPE", parts.rope),
        ("ENTRY", parts.entry),
        ("QUERY_NORM", int(parts.query_norm)),
        ("LATENT_EPS", float(request.attributes["latent_eps"])),
        ("ENTRY_WARPS", min(_MAX_WARPS, -(-parts.normed // _PIECE))),
        ("ENTRY_SHARED_BYTES", normed_bytes(parts.normed, 1)),
    )


def write_entries(request: LoweringRequest, kernel: Kernel) -> OpLaunch:
    """The launch of ``kernel`` behind the projection."""
    parts = parts_of(request)
    sizes = dict(entry_constants(request))
    return OpLaunch(
        kernel,
        grid=(request.tensors["x"].shape[0], 2, 1),
        block=32 * int(sizes["ENTRY_WARPS"]),
        shared_bytes=normed_bytes(parts.normed, 1),
        arguments=(
            *("q_norm", "latent_norm", "cos", "sin", "positions", "write_slot", "c_pool", "q"),
            PROJECTED,
        ),
        triggers_late=True,
    )


def projected_rows(request: LoweringRequest) -> Workspace:
    """Room for what was projected, until its parts are where they belong."""
    rows = request.tensors["x"].shape[0]
    return Workspace(PROJECTED, 2 * rows * TILE_ROWS * request.tensors["weight"].shape[0])
