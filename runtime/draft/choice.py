"""Select the draft policy of requests: a fixed shape, or a policy for their kind of steps.

Acceptance of greedy steps says little about sampled steps, so each kind has its own policy.
"""

from __future__ import annotations

from collections.abc import Callable

from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.host_proposal import WaitForTokens
from specbuild.runtime.draft.policy import ChosenDraft, DraftPolicy, FixedPolicy, StepOutcome
from specbuild.runtime.draft.tree import check_shape
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.errors import RequestError


class PolicyBySampling:
    """One policy for each kind of step: with or without sampling, with or without full logits.

    ``make(sampled, full_logits)`` creates the policy of a kind on first use.
    """

    def __init__(self, make: Callable[[bool, bool], DraftPolicy]) -> None:
        self._make = make
        self._by_kind: dict[tuple[bool, bool], DraftPolicy] = {}
        self._last: DraftPolicy | None = None

    @property
    def max_depth(self) -> int:
        """Return the largest depth, which all kinds share."""
        return self._of(sampled=False, full_logits=False).max_depth

    @property
    def reason(self) -> str:
        """Return the reason of the last step's policy."""
        return (self._last or self._of(sampled=False, full_logits=False)).reason

    def shape(self, step_context: StepContext) -> ChosenDraft | WaitForTokens:
        """Return the choice of the policy for this kind of step."""
        self._last = self._of(sampled=step_context.sampled, full_logits=step_context.full_logits)
        return self._last.shape(step_context)

    def observe(self, outcome: StepOutcome) -> None:
        """Pass the outcome to the policy of its kind."""
        kind = outcome.step_context
        self._of(sampled=kind.sampled, full_logits=kind.full_logits).observe(outcome)

    def _of(self, *, sampled: bool, full_logits: bool) -> DraftPolicy:
        kind = (sampled, full_logits)
        if kind not in self._by_kind:
            self._by_kind[kind] = self._make(*kind)
        return self._by_kind[kind]


def requested_policy(shape: DraftShape | None) -> FixedPolicy:
    """Return the policy of a request that gives a shape; None decodes without a draft."""
    if shape is None:
        return FixedPolicy(None, max_depth=0, reason="requested without a draft")
    return FixedPolicy(shape, max_depth=shape.draft_depth, reason="requested")


def require_shape(shape: DraftShape, manifest: Manifest) -> None:
    """Raise RequestError if the engine has no draft, or supports only smaller ones."""
    if not manifest.drafters:
        raise RequestError("a draft shape is given, but the engine was built without a draft")
    check_shape(shape, manifest.limits)
