"""What belongs to one draft model of an engine: its roles, caches, weights, and what it reads."""

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
    """One draft model; ``group`` is its cache group, ``d2t`` its vocabulary's offsets.

    ``drafter`` is its kind where an engine has several, else empty. ``step`` is its family's part
    of a step. ``columns`` says which of the states of ``layers`` that the target captures for all
    drafts are its own; None: all of them. ``mask_states`` bf16 [C] are those of mask rows, None
    for a draft without such rows.
    """

    drafter: str
    group: str
    geometry: DraftGeometry
    step: DraftStep
    d2t: Recipe
    layers: int
    columns: tuple[int, ...] | None = None
    mask_states: Recipe | None = None

    def own(self, name: str) -> str:
        """The engine's name of a role, or of a weight, of this draft."""
        return own_name(self.group, name)

    def inputs(self, rows: Mapping[str, Tensor], table: Tensor) -> dict[str, Tensor]:
        """What places ``rows`` in a launch and in its caches, by the inputs of its graphs.

        ``table`` [B, P] is the page table of the sequences that have rows.
        """
        found = {name: rows[name] for name in _LAUNCH if name in rows}
        found |= {f"{self.group}.{name}": rows[name] for name in _VIEW}
        return found | {f"{self.group}.page_table": table.view(table.shape[0], 1, table.shape[1])}


def mask_weight(draft: DraftParts) -> str:
    """The engine's name of the states of mask rows."""
    return draft.own(f"{DRAFT_PREFIX}mask_hidden")
