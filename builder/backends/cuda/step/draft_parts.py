"""The parts of one draft model in an engine: its roles, caches, weights and inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbuild.builder.backends.cuda.step.ir import Tensor
from specbuild.builder.graph.passes.weights import Recipe
from specbuild.builder.graph.weight_sources import DRAFT_PREFIX
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry, own_name

if TYPE_CHECKING:
    from specbuild.builder.backends.cuda.step.draft import DraftStep

_LAUNCH = ("token_ids", "positions", "row_start", "ancestor_bits", "logit_rows")
_VIEW = ("row_slot", "tree_start", "write_slot")


@dataclass(frozen=True)
class DraftParts:
    """One draft model; ``group`` is its cache group, ``d2t`` the offsets of its vocabulary.

    ``drafter`` is its kind if an engine has several drafts, else empty. ``step`` is its family's
    part of a step. The target captures ``layers`` hidden states for all drafts. ``columns`` are the
    indices of this draft's states among them, or None for all. ``mask_states`` bf16 [C] are those
    of mask rows, or None without mask rows.
    """

    drafter: str
    group: str
    geometry: DraftGeometry
    step: DraftStep
    d2t: Recipe
    layers: int
    columns: tuple[int, ...] | None = None
    mask_states: Recipe | None = None

    def full_name(self, name: str) -> str:
        """Return the engine's name of this draft's role or weight."""
        return own_name(self.group, name)

    def inputs(self, rows: Mapping[str, Tensor], table: Tensor) -> dict[str, Tensor]:
        """Return the inputs of the draft's graphs that place ``rows`` in a launch and its caches.

        ``table`` [B, P] is the page table of the sequences with rows.
        """
        return placed_rows(rows, {self.group: table})


def placed_rows(rows: Mapping[str, Tensor], tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs of a draft's graphs that place ``rows`` in a launch and in caches.

    ``tables`` are page tables [B, P] of the sequences with rows, by cache group.
    """
    inputs = {name: rows[name] for name in _LAUNCH if name in rows}
    for group, table in tables.items():
        inputs |= {f"{group}.{name}": rows[name] for name in _VIEW}
        inputs[f"{group}.page_table"] = table.view(table.shape[0], 1, table.shape[1])
    return inputs


def mask_weight(draft: DraftParts) -> str:
    """Return the engine's name of the hidden states of mask rows."""
    return draft.full_name(f"{DRAFT_PREFIX}mask_hidden")
