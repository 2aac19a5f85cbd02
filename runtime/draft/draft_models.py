"""Several draft models in one engine; the shape of a step selects the model that drafts."""

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
    """A shape with the kind of its draft model, for an engine with several models."""

    drafter: str


@dataclass(frozen=True)
class RaggedShape(ModelShape):
    """A chain of which each sequence verifies its own part, in a ragged step.

    A step of n sequences has up to ``rows_per_sequence`` · n rows of the target. ``drafter`` is
    empty if the engine has a single model.
    """

    rows_per_sequence: int


def model_of(shape: DraftShape) -> str:
    """Return the kind of a shape's draft model; empty if the engine has a single one."""
    return shape.drafter if isinstance(shape, ModelShape) else ""


def rows_per_sequence_of(shape: DraftShape) -> int:
    """Return the rows per sequence of a ragged step; 0 for the shape of another step."""
    return shape.rows_per_sequence if isinstance(shape, RaggedShape) else 0


def by_model(shape: DraftShape) -> str:
    """Return a suffix such as ``" of eagle3"`` for messages; empty for a single draft model."""
    return f" of {model_of(shape)}" if model_of(shape) else ""


def shape_text(shape: DraftShape) -> str:
    """Return top-k, depth and tokens as ``2x3x8``, or ``2x3x8 of eagle3`` with a model."""
    rows = f" in {shape.rows_per_sequence} rows" if isinstance(shape, RaggedShape) else ""
    return f"{shape.draft_top_k}x{shape.draft_depth}x{shape.draft_tokens}{rows}{by_model(shape)}"


def sorted_by_model(
    shapes: Iterable[DraftShape], place: Callable[[DraftShape], tuple[int, ...]]
) -> list[DraftShape]:
    """Sort the distinct shapes by model, then by the sort key ``place(shape)``.

    The models keep the order of their first shapes.
    """
    distinct = dict.fromkeys(shapes)
    models = [*dict.fromkeys(map(model_of, distinct))]
    return sorted(distinct, key=lambda shape: (models.index(model_of(shape)), *place(shape)))


def shape_of(model: str, shape: DraftShape, rows_per_sequence: int = 0) -> DraftShape:
    """Return the shape with its model; unchanged if ``model`` is empty and the step is not ragged.

    ``rows_per_sequence`` is that of a ragged step, 0 for other steps.
    """
    if rows_per_sequence:
        sizes = (shape.draft_top_k, shape.draft_depth, shape.draft_tokens)
        return RaggedShape(*sizes, model, rows_per_sequence)
    if not model:
        return shape
    return ModelShape(shape.draft_top_k, shape.draft_depth, shape.draft_tokens, model)


class DraftModels:
    """A drafter that combines the draft models of an engine; ``models`` maps kinds to models.

    Each model observes every token, and ingests its pending rows when it drafts again. So a model
    that does not draft adds no time to a step, and later catches up in a few large launches.
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
        """Pass the tokens to every model."""
        for model in self._models.values():
            model.observe(sequence, aux_hidden)

    def propose(self, sequences: Sequence[SequenceState], shape: DraftShape) -> DraftTrees:
        """Return the trees of the model that ``shape`` names, by default of the first."""
        return self._models.get(model_of(shape), self._first).propose(sequences, shape)

    def release(self, sequence: SequenceState) -> None:
        """Release the sequence in every model."""
        for model in self._models.values():
            model.release(sequence)
