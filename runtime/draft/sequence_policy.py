"""A measured policy with a depth for each sequence, and the policies of successive runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from specbuild.runtime.draft.costs import DraftCosts, StepContext
from specbuild.runtime.draft.draft_models import RaggedShape, model_of
from specbuild.runtime.draft.policy import (
    EXPLORATION_SHARE,
    MeasuredPolicy,
    SequenceDepths,
    StepOutcome,
)
from specbuild.runtime.engine_dir.manifest import DraftShape

# Weight of the estimate of all sequences for one sequence, in tokens tried.
PRIOR_TOKENS = 10.0
# Decay per tried token of the counts of a sequence.
DECAY = 0.98
# A kind with this decayed number of timed steps has a known time.
TIMED_STEPS = 0.1
# Sequences whose counts are kept, beyond those of the last step.
KEPT_SEQUENCES = 1024


class SequenceAcceptance:
    """Running acceptance of single sequences.

    A sequence with h accepted of n tried tokens has the estimate (h + 10 p_i) / (n + 10) at
    position i. p_i is the estimate of all sequences. Texts differ more than positions do, so a
    sequence has one count for all positions.
    """

    def __init__(self) -> None:
        self._counts: dict[int, tuple[float, float]] = {}

    def learn(
        self, sequences: Sequence[int], depths: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Count a step in which ``accepted[b]`` of ``depths[b]`` verified levels were accepted."""
        for sequence, depth, hits in zip(sequences, depths, accepted, strict=True):
            tried = min(hits + 1, depth)
            old_hits, old_tried = self._counts.pop(sequence, (0.0, 0.0))
            weight = DECAY**tried
            self._counts[sequence] = (weight * old_hits + hits, weight * old_tried + tried)

    def survival(
        self, sequences: Sequence[int], probabilities: Sequence[float] | np.ndarray
    ) -> np.ndarray:
        """Return the probability [B, D] that a level and all levels before it are accepted.

        ``probabilities`` are p_1, p_2, … of all sequences.
        """
        counts = np.array([self._counts.get(s, (0.0, 0.0)) for s in sequences]).reshape(-1, 2)
        hits, tried = counts[:, :1], counts[:, 1:]
        estimates = (hits + PRIOR_TOKENS * np.array(probabilities)) / (tried + PRIOR_TOKENS)
        return np.cumprod(estimates, axis=1)

    def forget(self, sequences: Sequence[int]) -> None:
        """Limit the counts to the newest sequences and to those of a step."""
        if len(self._counts) > KEPT_SEQUENCES + len(sequences):
            kept = [*self._counts][-KEPT_SEQUENCES:]
            self._counts = {s: self._counts[s] for s in (*kept, *sequences) if s in self._counts}


def likeliest_parts(survival: np.ndarray, tokens: int) -> tuple[np.ndarray, float]:
    """Return the depths [B] of the ``tokens`` likeliest levels of B chains, and their sum.

    ``survival`` [B, D] never rises along a chain, so the chosen levels of a chain are its first
    ones. Of equal levels the lower ones are chosen first, then those of earlier sequences.
    """
    batch = len(survival)
    levels = survival.T.ravel()
    chosen = np.argsort(-levels, kind="stable")[:tokens]
    return np.bincount(chosen % batch, minlength=batch), float(levels[chosen].sum())


class SequencePolicy(MeasuredPolicy):
    """A measured policy whose ragged steps verify a different part of each sequence's chain.

    A step of T rows has T − B drafted tokens of B sequences. The policy chooses the likeliest ones,
    by the running acceptance of each sequence (:class:`SequenceAcceptance`). The rates of all
    chains are calculated with these estimates. The choice changes no token: a row has the same bits
    in every step.
    """

    def __init__(
        self,
        costs: DraftCosts,
        *,
        before: MeasuredPolicy | None = None,
        exploration_share: float = EXPLORATION_SHARE,
    ) -> None:
        super().__init__(costs, before=before, exploration_share=exploration_share)
        self._by_model: dict[str, SequenceAcceptance] = {}
        self._expected: dict[StepContext, list[float]] = {}

    def shape(self, step_context: StepContext) -> DraftShape | SequenceDepths | None:  # type: ignore[override]
        """Return the best draft, or another one to explore; ragged ones with their depths."""
        chosen = super().shape(step_context)
        if not isinstance(chosen, RaggedShape):
            return chosen
        survival = self._survival_of(step_context)[model_of(chosen)][:, : chosen.draft_depth]
        tokens = (chosen.rows_per_sequence - 1) * step_context.batch
        depths, _ = likeliest_parts(survival, tokens)
        return SequenceDepths(chosen, tuple(depths.tolist()))

    def observe(self, outcome: StepOutcome) -> None:
        """Update the acceptance of each sequence, then everything else."""
        shape = outcome.shape
        if isinstance(shape, SequenceDepths):
            shape = shape.shape
            outcome = replace(outcome, shape=shape)
        if isinstance(shape, DraftShape) and shape.draft_top_k == 1 and outcome.sequences:
            acceptance = self._by_model.setdefault(model_of(shape), SequenceAcceptance())
            acceptance.learn(outcome.sequences, outcome.depths, outcome.accepted)
            acceptance.forget(outcome.step_context.sequences)
        self._expected.clear()
        super().observe(outcome)

    def _optimism(self, kind: int) -> float:
        """Return the bonus; 0 for a chain about which the steps of the best kind say everything."""
        best, shape = self._options[self._best], self._options[kind]
        is_part = (
            best is not None
            and shape is not None
            and best.draft_top_k == shape.draft_top_k == 1
            and self._same_model(self._best, kind)
            and shape.draft_depth <= best.draft_depth
        )
        is_timed = self._times_of(self._step_context.batch).timed(kind) > TIMED_STEPS
        return 0.0 if is_part and is_timed else super()._optimism(kind)

    def _survival_of(self, step_context: StepContext) -> Mapping[str, np.ndarray]:
        """Return the survival [B, D] of the longest chain of each model."""
        share = step_context.num_sampled / step_context.batch
        greedy, sampled = (self.acceptance_by_model(sampled=kind) for kind in (False, True))
        return {
            model: self._by_model.setdefault(model, SequenceAcceptance()).survival(
                step_context.sequences,
                (1 - share) * np.array(chain) + share * np.array(sampled[model]),
            )
            for model, chain in greedy.items()
        }

    def _tokens(self, step_context: StepContext) -> Sequence[float]:
        """Return the expected tokens of each kind; of chains by the acceptance of each sequence."""
        if step_context not in self._expected:
            expected = list(super()._tokens(step_context))
            survival = self._survival_of(step_context) if step_context.sequences else {}
            for kind, shape in enumerate(self._options):
                if shape is None or shape.draft_top_k > 1:
                    continue
                if survival:
                    expected[kind] = self._expected_of(shape, survival[model_of(shape)])
                elif isinstance(shape, RaggedShape):
                    expected[kind] = 0.0
            self._expected[step_context] = expected
        return self._expected[step_context]

    @staticmethod
    def _expected_of(shape: DraftShape, survival: np.ndarray) -> float:
        batch, of_chain = len(survival), survival[:, : shape.draft_depth]
        if isinstance(shape, RaggedShape):
            _, accepted = likeliest_parts(of_chain, (shape.rows_per_sequence - 1) * batch)
            return 1 + accepted / batch
        return 1 + float(of_chain.sum()) / batch


class LearnedPolicies:
    """The measured policies of successive runs; each starts from the estimates of the one before.

    Estimates are separate for each drafter, and for steps with and without full logits.
    """

    def __init__(self) -> None:
        self._by_kind: dict[tuple[str, bool], MeasuredPolicy] = {}

    def next(
        self,
        costs: DraftCosts,
        *,
        full_logits: bool = False,
        drafter: str = "",
        exploration_share: float = EXPLORATION_SHARE,
    ) -> MeasuredPolicy:
        """Return the policy of a new run with the drafter of this name."""
        kind = (drafter, full_logits)
        has_ragged = any(isinstance(shape, RaggedShape) for shape in costs.shapes)
        policy = (SequencePolicy if has_ragged else MeasuredPolicy)(
            costs, before=self._by_kind.get(kind), exploration_share=exploration_share
        )
        self._by_kind[kind] = policy
        return policy
