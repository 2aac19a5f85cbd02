"""The kinds of steps that a policy chooses among, and the acceptance of their drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specbuild.runtime.draft.acceptance import Acceptance, expected_tokens, widened_acceptance
from specbuild.runtime.draft.draft_models import model_of
from specbuild.runtime.engine_dir.manifest import DraftShape


class StepKinds:
    """The numbered kinds of steps: kind 0 has no draft, each further kind has one shape.

    ``options[k]`` is the shape of kind k and ``models[k]`` its draft model; both are None for kind
    0. All chains of a model share their counts by position. Each tree has separate counts; its
    prior is the estimate of a chain, corrected for wider levels. ``priors`` has the prior of p_1 of
    a chain by model, ``prior`` is the value for all other models.
    """

    def __init__(
        self, shapes: Sequence[DraftShape], *, prior: float, priors: Mapping[str, float]
    ) -> None:
        self.options: tuple[DraftShape | None, ...] = (None, *shapes)
        self.models = (None, *map(model_of, shapes))
        model_names = dict.fromkeys(map(model_of, shapes)) or {"": None}
        self._number = {shape: number for number, shape in enumerate(self.options)}
        self._prior = {model: priors.get(model, prior) for model in model_names}
        self._chains = {
            model: Acceptance(
                max((s.draft_depth for s in shapes if _is_chain_of(s, model)), default=0)
            )
            for model in model_names
        }
        self._trees = {s: Acceptance(s.draft_depth) for s in shapes if s.draft_top_k > 1}
        self._expected: list[float] | None = None

    def number(self, shape: DraftShape | None) -> int | None:
        """Return the kind of a shape; None if no kind has this shape."""
        return self._number.get(shape)

    @property
    def acceptance(self) -> dict[str, list[float]]:
        """The current estimates p_1, p_2, … of a chain by model."""
        return {model: self._estimates(model) for model in self._chains}

    @property
    def tokens(self) -> list[float]:
        """Expected tokens per step and sequence of each kind."""
        if self._expected is None:
            self._expected = [
                expected_tokens(self.probabilities(shape))[-1] for shape in self.options
            ]
        return self._expected

    def probabilities(self, shape: DraftShape | None) -> list[float]:
        """Return p_1, p_2, … of the levels of a shape; empty without a draft."""
        if shape is None:
            return []
        depth, estimates = shape.draft_depth, self._estimates(model_of(shape))
        if shape.draft_top_k == 1:
            return estimates[:depth]
        prior = self._prior[model_of(shape)]
        chain = [*estimates, *[estimates[-1] if estimates else prior] * depth][:depth]
        width = shape.draft_tokens / depth
        return self._trees[shape].corrected(widened_acceptance(p, width) for p in chain)

    def long_term_tokens(self, kind: int) -> float:
        """Return the expected tokens of a kind, for a chain by its long-term acceptance."""
        shape = self.options[kind]
        if shape is None or shape.draft_top_k > 1:
            return self.tokens[kind]
        model = model_of(shape)
        probabilities = self._chains[model].long_term(self._prior[model])
        return expected_tokens(probabilities[: shape.draft_depth])[-1]

    def learn(self, shape: DraftShape, depths: Sequence[int], accepted: Sequence[int]) -> None:
        """Count a step in which ``accepted[b]`` of ``depths[b]`` verified levels were accepted."""
        model = model_of(shape)
        counts = self._chains.get(model) if shape.draft_top_k == 1 else self._trees.get(shape)
        if counts is not None:
            counts.learn(depths, accepted)
            self._expected = None

    def _estimates(self, model: str) -> list[float]:
        return self._chains[model].estimates(self._prior[model])


def _is_chain_of(shape: DraftShape, model: str) -> bool:
    return shape.draft_top_k == 1 and model_of(shape) == model
