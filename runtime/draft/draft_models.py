"""Several draft models of one engine; a step's shape names the model that drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specbuild.runtime.draft.drafter import CachingDrafter
from specbuild.runtime.draft.tree import DraftTrees
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import SequenceState


@dataclass(frozen=True)
class ModelShape(DraftShape):
    """A shape of one of several draft models, by its kind."""

    drafter: str


def model_of(shape: DraftShape) -> str:
    """Return the kind of the model that a shape names; empty if it names none."""
    return shape.drafter if isinstance(shape, ModelShape) else ""


def by_model(shape: DraftShape) -> str:
    """Return `` of eagle3`` for a shape's text; empty if the shape names no model."""
    return f" of {model_of(shape)}" if model_of(shape) else ""


def shape_text(shape: DraftShape) -> str:
    """``2x3x8``, the sizes of a shape, or ``2x3x8 of eagle3``."""
    return f"{shape.draft_top_k}x{shape.draft_depth}x{shape.draft_tokens}{by_model(shape)}"


def sorted_by_model(
    shapes: Iterable[DraftShape], place: Callable[[DraftShape], tuple[int, ...]]
) -> list[DraftShape]:
    """Return distinct shapes by model in order of appearance, then by ``place``."""
    once = dict.fromkeys(shapes)
    models = [*dict.fromkeys(map(model_of, once))]
    return sorted(once, key=lambda shape: (models.index(model_of(shape)), *place(shape)))


def shape_of(model: str, shape: DraftShape) -> DraftShape:
    """Return the shape with its model; unchanged if ``model`` is empty."""
    if not model:
        return shape
    return ModelShape(shape.draft_top_k, shape.draft_depth, shape.draft_tokens, model)


class DraftModels:
    """The draft models of an engine, by kind, as one drafter.

    Each model observes every token, and ingests pending rows when it drafts again. An idle model
    thus adds nothing to a step; it catches up in a few large launches.
    """

    def __init__(self, models: Mapping[str, CachingDrafter]) -> None:
        self._models = models
        self._first = next(iter(models.values()))
        self.capabilities = replace(self._first.capabilities, name=" and ".join(models))

    @property
    def cache_groups(self) -> tuple[str, ...]:
        """The cache groups of all models, in order."""
        return tuple(group for model in self._models.values() for group in model.cache_groups)

    def observe(self, sequence: SequenceState, aux_hidden: np.ndarray | None) -> None:
        """Notify every model."""
        for model in self._models.values():
            model.observe(sequence, aux_hidden)

    def propose(self, sequences: Sequence[SequenceState], shape: DraftShape) -> DraftTrees:
        """Return the trees of the model that ``shape`` names, by default of the first."""
        return self._models.get(model_of(shape), self._first).propose(sequences, shape)

    def release(self, sequence: SequenceState) -> None:
        """Release the sequence in every model."""
        for model in self._models.values():
            model.release(sequence)
