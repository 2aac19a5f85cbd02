"""The draft models of an engine in the form that its steps need, from the checkpoints."""

from __future__ import annotations

import torch

from specbuild.builder.backends.cuda.step.draft_parts import DraftParts
from specbuild.builder.families.registry import draft_family
from specbuild.builder.graph.passes.weights import Recipe
from specbuild.builder.graph.weight_sources import WeightSources
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry, aux_layers_of
from specbuild.runtime.errors import SpecbuildError


def draft_parts(sources: WeightSources) -> tuple[DraftParts, ...]:
    """Return the parts of every draft, the first draft first."""
    captured = aux_layers_of([draft.geometry for draft in sources.drafts.values()])
    several = len(sources.drafts) > 1
    parts = []
    for group, draft in sources.drafts.items():
        geometry = draft.geometry
        columns = _columns(geometry, captured)
        parts.append(
            DraftParts(
                draft.record.kind if several else "",
                group,
                geometry,
                draft_family(geometry.architecture).cuda.step,
                sources.d2t(group),
                len(captured),
                columns,
                _mask_states(sources, group, columns, len(captured)),
            )
        )
    return tuple(parts)


def _columns(geometry: DraftGeometry, captured: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the positions of a draft's layers among all captured layers; None if it reads all."""
    aux_layers = geometry.aux_layers
    if aux_layers == captured:
        return None
    # The first draft's layers come first and in its order, even if it reads one twice.
    first = aux_layers == captured[: len(aux_layers)]
    return (
        tuple(range(len(aux_layers)))
        if first
        else tuple(captured.index(layer) for layer in aux_layers)
    )


def _mask_states(
    sources: WeightSources, group: str, columns: tuple[int, ...] | None, layers: int
) -> Recipe | None:
    """Return the hidden states of mask rows in the columns of the draft's layers, or None."""
    states, geometry = sources.mask_hidden(group), sources.drafts[group].geometry
    if states is None or columns is None:
        return states
    if len(set(columns)) < len(columns):
        raise SpecbuildError(
            f"--draft: the {geometry.architecture} reads a layer twice, so its mask rows have "
            "separate states for it; list this draft first"
        )
    width = states.shape[0] // len(columns)

    def spread() -> torch.Tensor:
        rows = torch.zeros(layers, width, dtype=states.dtype)
        rows[list(columns)] = states.checked().view(-1, width)
        return rows.flatten()

    return Recipe((layers * width,), states.dtype, states.sources, spread)
