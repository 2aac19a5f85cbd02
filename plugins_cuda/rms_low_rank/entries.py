"""The launch of RmsLowRank for norms and RoPE of the projected rows, and for cache entries."""

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
    """The widths of a projected row's parts (queries, latent, rotated key) and of an entry."""

    query: int
    rank: int
    rope: int
    entry: int
    query_norm: bool

    @property
    def normed(self) -> int:
        """The widest normalized part."""
        return max(self.rank, self.query if self.query_norm else 0)


def parts_of(request: LoweringRequest) -> Parts:
    """Return the parts; SpecbuildError if they are not made of 16-byte vectors."""
    tensors = request.tensors
    rank, rope = tensors["latent_norm"].shape[0], 2 * tensors["cos"].shape[1]
    query = tensors["weight"].shape[0] * TILE_ROWS - rank - rope
    entry, dtype = tensors["c_pool"].shape[3], tensors["c_pool"].dtype
    held = entry >= rank + rope and not any(size % _VECTOR for size in (query, rank, entry))
    if not held or dtype != "bfloat16":
        raise SpecbuildError(
            f"RmsLowRank: got cache entries of {entry} {dtype} values, latents of {rank}, keys of "
            f"{rope} and queries of {query}, expected bfloat16 in multiples of {_VECTOR}; build "
            "for the cpu backend"
        )
    return Parts(query, rank, rope, entry, "q_norm" in tensors)


def entry_constants(request: LoweringRequest) -> tuple[tuple[str, int | float], ...]:
    """Return the constants of the launch; see ``device/entries.cuh``."""
    parts = parts_of(request)
    return (
        ("QUERY", parts.query),
        ("RANK", parts.rank),
        ("ROPE", parts.rope),
        ("ENTRY", parts.entry),
        ("QUERY_NORM", int(parts.query_norm)),
        ("LATENT_EPS", float(request.attributes["latent_eps"])),
        ("ENTRY_WARPS", min(_MAX_WARPS, -(-parts.normed // _PIECE))),
        ("ENTRY_SHARED_BYTES", normed_bytes(parts.normed)),
    )


def write_entries(request: LoweringRequest, kernel: Kernel) -> OpLaunch:
    """Return the launch of ``kernel`` that follows the projection."""
    parts = parts_of(request)
    sizes = dict(entry_constants(request))
    return OpLaunch(
        kernel,
        grid=(request.tensors["x"].shape[0], 2, 1),
        block=32 * int(sizes["ENTRY_WARPS"]),
        shared_bytes=normed_bytes(parts.normed),
        arguments=(
            *("q_norm", "latent_norm", "cos", "sin", "positions", "write_slot", "c_pool", "q"),
            PROJECTED,
        ),
        triggers_late=True,
    )


def projected_rows(request: LoweringRequest) -> Workspace:
    """Return the workspace of the projected rows."""
    rows = request.tensors["x"].shape[0]
    return Workspace(PROJECTED, 2 * rows * TILE_ROWS * request.tensors["weight"].shape[0])
