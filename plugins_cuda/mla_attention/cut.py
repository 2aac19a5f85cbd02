"""The grid of latent attention with rebuilt keys: rows and splits of the context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specbuild.plugins_cuda.launches import LoweringRequest
from specbuild.plugins_cuda.mla_attention.geometry import (
    CTA_FEATURES,
    MAX_HELD,
    MAX_SUMS,
    WIDTHS,
    LatentGeometry,
)
from specbuild.runtime.errors import SpecbuildError

# Heads of a KV head in a row of weights.
HEADS = 8
MAX_STAGES, FEWEST_STAGES = 5, 2
# The attending warpgroups of a CTA with stored keys; each has two rows. Then the registers of a
# thread for sums, with which narrow heads, of which there are more, still fit.
CONSUMER_WARPGROUPS = 2
MAX_SUMS_OF_NARROW_HEADS = 96

# Splits of the context, and groups of them that are merged first. They are constants of the layer,
# because the order of a row's sums depends on them. The CTAs of one row should fill the GPU; those
# of many rows process complete groups, which leaves fewer states. A window has few tiles, one per
# CTA.
CTAS_WANTED = 128
MAX_SPLITS, FEWEST_SPLITS, WINDOW_SPLITS = 128, 16, 4
SPLITS_OF_A_GROUP, FEWEST_GROUPS = 8, 8
WIDEST_WINDOW_OF_FEW_SPLITS = 256


@dataclass(frozen=True)
class LatentCut:
    """The grid of one launch; ``rows`` are those of an attending warpgroup.

    A CTA with one such warpgroup rebuilds its keys itself, and a sequence has ``row_ctas``. Several
    ``consumer_warpgroups`` share keys that an earlier launch rebuilt. Rows with lists have
    ``listed_ctas`` over the context, and as many places.
    """

    split: int
    groups: int
    splits_in_use: int
    context_ctas: int
    listed_ctas: int
    rows: int
    row_ctas: int
    consumer_warpgroups: int

    @property
    def places(self) -> int:
        """States of a row and head in the workspaces, per split or per complete group."""
        whole_groups = self.context_ctas <= self.groups < self.split
        return min(self.groups, self.splits_in_use) if whole_groups else self.splits_in_use

    def constants(self, shape: LatentGeometry) -> tuple[tuple[str, int | float], ...]:
        """Return the constants of the attending kernels."""
        return (
            *shape.walk_constants(),
            ("VALUE", shape.value),
            ("Q_HEADS", shape.q_heads),
            ("GROUP", shape.group),
            ("SCALE", shape.scale),
            ("SPLIT", self.split),
            ("GROUPS", self.groups),
            ("PLACES", self.places),
            ("SPLITS_IN_USE", self.splits_in_use),
            ("CONTEXT_CTAS", self.context_ctas),
            ("ROWS", self.rows),
            ("CONSUMER_WARPGROUPS", self.consumer_warpgroups),
        )

    def states(self, shape: LatentGeometry) -> int:
        """Return the rows of weights of a consumer warpgroup.

        They are its rows × two or more KV heads × their query heads.
        """
        return self.rows * (CTA_FEATURES // shape.width) * HEADS


def latent_cut(request: LoweringRequest, shape: LatentGeometry) -> LatentCut:
    """Return the grid, with overrides by the tactic's ``rows``, ``consumer_warpgroups`` etc."""
    split, split_groups = _split(shape)
    in_use = max(1, min(split, -(-shape.capacity // shape.tile)))
    sequence_rows = -(-shape.rows // shape.batch)
    several = sequence_rows > 1 and shape.entry <= MAX_HELD and shape.sums_held(2) <= MAX_SUMS
    max_rows = 2 if several else 1
    rows = request.tactic.get("rows", max_rows)
    consumer_warpgroups = request.tactic.get("mixers", CONSUMER_WARPGROUPS)
    if rows == 1 or sequence_rows <= rows or shape.window or not _fits_registers(shape):
        consumer_warpgroups = 1

    def ctas(rows_of_cta: int, fewest: int) -> int:
        groups = shape.batch * shape.head_groups * -(-sequence_rows // rows_of_cta)
        fill = min(in_use, max(fewest, request.target.multiprocessors // groups))
        return min(in_use, request.tactic.get("context_ctas", _even(fill, split)))

    # A launch may have capacity for more rows than there are. The actual rows should still fill the
    # GPU. This is free if keys are stored, because groups have one state anyway.
    context_ctas = ctas(rows * consumer_warpgroups, 1 if consumer_warpgroups == 1 else split_groups)
    listed_ctas = ctas(rows, 1)
    if shape.has_lists and listed_ctas <= split_groups:
        context_ctas = min(context_ctas, split_groups)
    row_ctas = -(-sequence_rows // rows)
    return LatentCut(
        split, split_groups, in_use, context_ctas, listed_ctas, rows, row_ctas, consumer_warpgroups
    )


def _fits_registers(shape: LatentGeometry) -> bool:
    """Return whether the registers suffice for warpgroups that attend to stored keys."""
    max_sums = MAX_SUMS if shape.width == max(WIDTHS) else MAX_SUMS_OF_NARROW_HEADS
    return shape.sums_held(2) <= max_sums


def stages_of(
    request: LoweringRequest, shape: LatentGeometry, bytes_of: Callable[[int], int]
) -> int:
    """Return the tiles in flight: as many as fit in shared memory by ``bytes_of``.

    Raises SpecbuildError if the minimum does not fit.
    """
    limit = request.target.shared_bytes_per_block
    stages = request.tactic.get("stages", MAX_STAGES)
    while stages > FEWEST_STAGES and bytes_of(stages) > limit:
        stages -= 1
    require_shared(shape, bytes_of(stages), limit)
    return stages


def require_shared(shape: LatentGeometry, nbytes: int, limit: int) -> None:
    """Raise SpecbuildError for more bytes of shared memory than a CTA has."""
    if nbytes > limit:
        raise SpecbuildError(
            f"MlaAttention: cache entries of {shape.entry} values need {nbytes} bytes of shared "
            f"memory, a CTA has {limit}; build for the cpu backend"
        )


def _split(shape: LatentGeometry) -> tuple[int, int]:
    """Return the splits of a layer's context, and their groups."""
    if 0 < shape.window <= WIDEST_WINDOW_OF_FEW_SPLITS:
        return WINDOW_SPLITS, WINDOW_SPLITS
    splits = 1 << (CTAS_WANTED // shape.head_groups).bit_length() - 1
    splits = max(FEWEST_SPLITS, min(splits, MAX_SPLITS))
    return splits, max(FEWEST_GROUPS, splits // SPLITS_OF_A_GROUP)


def _even(context_ctas: int, split: int) -> int:
    """Return the largest number of CTAs, up to ``context_ctas``, that divides the splits evenly."""
    return min(split, 1 << context_ctas.bit_length() - 1)
