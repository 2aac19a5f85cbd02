"""What belongs to one draft model of an engine: its roles, caches, weights, and what it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from specbuild.builder.backends.cuda.step.ir import Tensor
from specbuild.builder.graph.passes.weights import Recipe
from specbuild.builder.graph.weight_sources import DRAFT_PREFIX, WeightSources
from specbuild.runtime.engine_dir.drafters import aux_layers_of, own_name
from specbuild.runtime.engine_dir.geometry import DFlashGeometry, DraftGeometry, PEagleGeometry
from specbuild.runtime.errors import SpecbuildError

_LAUNCH = ("token_ids", "positions", "row_start", "ancestor_bits", "logit_rows")
_VIEW = ("row_slot", "tree_start", "write_slot")


@dataclass(frozen=True)
class MaskRows:
    """Mask rows of a draft: their token, and their states bf16 [C]."""

    token: int
    states: Recipe


@dataclass(frozen=True)
class DraftParts:
    """One draft model; ``group`` is its cache group, ``d2t`` its vocabulary's offsets.

    ``drafter`` is its kind where an engine has several, else empty. ``columns`` says which of the
    states of ``layers`` that the target captures for all drafts are its own; None: all of them.
    ``mask`` is there for one whose mask rows have states (P-EAGLE).
    """

    drafter: str
    group: str
    geometry: DraftGeometry
    d2t: Recipe
    layers: int
    columns: tuple[int, ...] | None = None
    mask: MaskRows | None = None

    @property
    def block(self) -> DFlashGeometry | None:
        """Its shape where its queries are a block (DFlash)."""
        return self.geometry if isinstance(self.geometry, DFlashGeometry) else None

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


def draft_parts(sources: WeightSources) -> tuple[DraftParts, ...]:
    """The parts of every draft, the first one in front."""
    read = aux_layers_of([draft.geometry for draft in sources.drafts.values()])
    several = len(sources.drafts) > 1
    found = []
    for group, draft in sources.drafts.items():
        geometry = draft.geometry
        columns = _columns(geometry, read)
        found.append(
            DraftParts(
                draft.record.kind if several else "",
                group,
                geometry,
                sources.d2t(group),
                len(read),
                columns,
                _mask_rows(sources, group, columns, len(read)),
            )
        )
    return tuple(found)


def _columns(geometry: DraftGeometry, read: tuple[int, ...]) -> tuple[int, ...] | None:
    """Where the layers of a draft stand among those that all read; None: they are all."""
    own = geometry.aux_layers
    if own == read:
        return None
    # The first draft's stand in front as they are, also one that it reads twice.
    first = own == read[: len(own)]
    return tuple(range(len(own))) if first else tuple(read.index(layer) for layer in own)


def mask_weight(draft: DraftParts) -> str:
    """The engine's name of the states of mask rows."""
    return draft.own(f"{DRAFT_PREFIX}mask_hidden")


def _mask_rows(
    sources: WeightSources, group: str, columns: tuple[int, ...] | None, layers: int
) -> MaskRows | None:
    """None for a draft without states for mask rows; they lie where the target's own would."""
    states, geometry = sources.mask_hidden(group), sources.drafts[group].geometry
    if states is None:
        return None
    assert isinstance(geometry, PEagleGeometry)
    if columns is None:
        return MaskRows(geometry.mask_token, states)
    if len(set(columns)) < len(columns):
        raise SpecbuildError(
            f"--draft: the {geometry.architecture} reads a layer twice, for which its mask rows "
            "have other states; give it first"
        )
    width = states.shape[0] // len(columns)

    def spread() -> torch.Tensor:
        found = torch.zeros(layers, width, dtype=states.dtype)
        found[list(columns)] = states.checked().view(-1, width)
        return found.flatten()

    recipe = Recipe((layers * width,), states.dtype, states.sources, spread)
    return MaskRows(geometry.mask_token, recipe)
