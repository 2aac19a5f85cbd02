"""PagedTreeAttention for many sequences: each team of warps has separate splits."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.plugins_cuda.launches import Kernel, LoweringRequest, OpLaunch, Target
from specbuild.plugins_cuda.paged_tree_attention.geometry import (
    ARGUMENTS,
    FLAG_BYTES,
    HEADS,
    WIDE,
    Geometry,
    tile_bytes,
)

MAX_TEAMS = 8
WIDTHS = (16, 32, 64, 128)
MAX_WARPS = 8  # so that a thread can have 255 registers
MAX_MMAS_OF_A_WARP, MAX_ROW_WARPS = 2, 2
SHARE_BYTES = 32  # of a Share (device/attention_shares.cuh)


@dataclass(frozen=True)
class SplitPerWarp:
    """The grid of a launch: ``teams`` of ``row_warps`` warps with ``rows`` rows each."""

    teams: int
    rows: int
    row_warps: int
    row_ctas: int
    stages: int

    def shared_bytes(self, shape: Geometry) -> int:
        """Return the bytes of tiles, trees, queries, the teams' states, and their total."""
        tiles = tile_bytes(
            shape, teams=self.teams, stages=self.stages, rows=self.rows, row_warps=self.row_warps
        )
        part = shape.halves(self.rows) * HEADS * (4 * shape.width + 8)
        running = self.rows * self.row_warps * shape.group * shape.width * 4
        return tiles + self.teams * self.row_warps * part + running + FLAG_BYTES + SHARE_BYTES

    def ctas_of_an_sm(self, shape: Geometry, target: Target) -> int:
        """Return one or two CTAs, as shared memory and registers allow."""
        fits = target.fits_twice(self.shared_bytes(shape))
        return 2 if fits and 2 * self.teams * self.row_warps <= MAX_WARPS else 1


def max_teams(shape: Geometry) -> int:
    """Return the maximum of teams of a CTA whose rings fit in shared memory."""
    return MAX_TEAMS if shape.width <= WIDE else MAX_TEAMS // 2


def split_per_warp(
    request: LoweringRequest, shape: Geometry, teams: int, stages: int
) -> SplitPerWarp | None:
    """Return the grid with up to ``teams`` and ``stages`` tiles each; None if it does not fit."""
    if shape.width not in WIDTHS:
        return None
    max_warp_rows = shape.mma_rows * (MAX_MMAS_OF_A_WARP if shape.width <= WIDE else 1)
    each = -(-shape.rows // shape.batch)
    row_ctas = -(-each // (max_warp_rows * MAX_ROW_WARPS))
    rows = -(-each // row_ctas)
    row_warps = -(-rows // max_warp_rows)
    teams = min(teams, MAX_WARPS // row_warps)
    cut = SplitPerWarp(teams, -(-rows // row_warps), row_warps, row_ctas, stages)
    return cut if cut.shared_bytes(shape) <= request.target.shared_bytes_per_block else None


def split_per_warp_launch(
    request: LoweringRequest, shape: Geometry, cut: SplitPerWarp, split: int, splits: int
) -> OpLaunch:
    """Return the launch; its workspaces are those of any cut of the context."""
    together = cut.ctas_of_an_sm(shape, request.target)
    shares = together * request.target.multiprocessors // (shape.kv_heads * cut.row_ctas)
    constants = (
        *shape.constants(),
        ("SPLIT", split),
        ("SLOTS", splits),
        ("SPLIT_TEAMS", cut.teams),
        ("ROWS", cut.rows),
        ("ROW_WARPS", cut.row_warps),
        ("ROW_CTAS", cut.row_ctas),
        ("STAGES", cut.stages),
        ("BATCH", shape.batch),
        ("CTAS_OF_AN_SM", together),
        ("SHARED_BYTES", cut.shared_bytes(shape)),
    )
    names = ("workspace_arrivals", "workspace_sums", "workspace_values")
    return OpLaunch(
        Kernel("paged_tree_attention", "attend_split_per_warp", constants, "split_per_warp.cu"),
        grid=(max(1, shares) * cut.row_ctas, shape.kv_heads, 1),
        block=32 * cut.teams * cut.row_warps,
        shared_bytes=cut.shared_bytes(shape),
        arguments=(*ARGUMENTS, *names),
        reads_early=True,
    )
