"""The draft models of an engine as its steps take them, out of the checkpoints."""

from __future__ import annotations

import torch

from specbuild.builder.backends.cuda.step.draft_parts import DraftParts
from specbuild.builder.families.registry import draft_family
from specbuild.builder.graph.passes.weights import Recipe
from specbuild.builder.graph.weight_sources import WeightSources
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry, aux_layers_of
from specbuild.runtime.errors import SpecbuildError


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
                draft_family(geometry.architecture).cuda.step,
                sources.d2t(group),
                len(read),
                columns,
                _mask_states(sources, group, columns, len(read)),
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


def _mask_states(
    sources: WeightSources, group: str, columns: tuple[int, ...] | None, layers: int
) -> Recipe | None:
    """The states of mask rows, in the columns of the draft's layers; None without such rows."""
    states, geometry = sources.mask_hidden(group), sources.drafts[group].geometry
    if states is None or columns is None:
        return states
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

    return Recipe((layers * width,), states.dtype, states.sources, spread)
