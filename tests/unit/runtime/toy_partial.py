"""The toy model with SpecPV: its full layer reads views and checks their content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from toy_model import ToyExecutor, toy_manifest

from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import Manifest, SpecPv
from specbuild.runtime.lossy.specpv.host_tables import view_geometry

# Blocks of two pages; a sink and a window of one.
TOY_SPECPV = SpecPv(
    block_size=8,
    n_sink_blocks=1,
    n_retrieval_blocks=1,
    n_window_blocks=1,
    n_spec_tokens_buf=24,
    partial_threshold=16,
    full_refresh_interval=5,
)


def partial_manifest(specpv: SpecPv = TOY_SPECPV, **options: object) -> Manifest:
    """Return a manifest whose launches include re-verified tokens."""
    return replace(toy_manifest(max_rows=3 * (24 + 13), **options), specpv=specpv)


@dataclass
class Seen:
    """The positions visible to one sequence's rows in a launch, and whether a view was chosen."""

    positions: list[int]
    length: int
    rows: int
    chosen: bool


class PartialToyExecutor(ToyExecutor):
    """Checks every launch against the rules of a view."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        geometry = view_geometry(manifest)
        assert geometry is not None
        self._geometry = geometry
        pages = manifest.group("full").pages
        self._summaries = torch.full((pages, 1, 2, 1), float("nan"))
        self.seen: list[list[Seen]] = []

    def _target(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = super()._target(feeds)
        asked = {name: torch.from_numpy(feeds[f"full.{name}"]) for name in _ASKED}
        pages = {
            "sink_pages": self._geometry.sink_pages,
            "block_pages": self._geometry.block_pages,
        }
        self._summaries = op_named("KvBlockSummary").reference(
            self._summaries,
            self._pools["full.k"],
            asked["logical_pages"],
            asked["first_block"],
            asked["blocks"],
            **pages,
        )
        ids = torch.from_numpy(feeds["token_ids"].astype(np.float32)).view(-1, 1, 1)
        table = op_named("KvBlockSelect").reference(
            ids - 12,
            self._summaries,
            asked["logical_pages"],
            torch.from_numpy(feeds["row_start"].copy()),
            asked["row_slot"],
            asked["tree_start"],
            asked["tree_count"],
            asked["blocks"],
            asked["budget"],
            asked["partial_table"][0],
            reduction="mean",
            score="dot",
            **pages,
        )
        self.seen.append([self._look(feeds, b) for b in range(len(feeds["full.blocks"]))])
        return outputs | {"full.partial_table.out": table[None].numpy()}

    def _look(self, feeds: Mapping[str, np.ndarray], b: int) -> Seen:
        """Return positions in view order; each row's page must be at its position."""
        size = self._geometry.page_size
        row_start, start = feeds["row_start"], int(feeds["full.tree_start"][b])
        rows = slice(int(row_start[b]), int(row_start[b + 1]))
        logical = {int(p): i for i, p in enumerate(feeds["full.logical_pages"][b]) if p}
        table = feeds["full.page_table"][0, b, 0]
        slots = feeds["full.row_slot"][rows]
        last = int(slots.max())
        positions = [
            logical[int(table[slot // size])] * size + slot % size for slot in range(last + 1)
        ]
        for slot, write in zip(slots, feeds["full.write_slot"][rows], strict=True):
            page = int(feeds["full.logical_pages"][b][positions[slot] // size])
            assert page * size + positions[slot] % size == write
        tree = int(feeds["full.tree_count"][b])
        length = int(feeds["positions"][rows][-tree]) if tree else last + 1
        assert not tree or positions[start] == length
        chosen = bool(feeds["full.blocks"][b] >= 0)
        return Seen(positions, length, rows.stop - rows.start, chosen)


_ASKED = (
    "logical_pages", "first_block", "blocks", "budget", "tree_count", "partial_table",
    "row_slot", "tree_start",
)  # fmt: skip


def partial_engine(manifest: Manifest) -> tuple[Engine, PartialToyExecutor]:
    """Return a new engine whose released pages are poisoned."""
    executor = PartialToyExecutor(manifest)
    return Engine(manifest, executor, pages_released=executor.poison), executor
