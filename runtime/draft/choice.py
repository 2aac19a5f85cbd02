"""Select the draft policy of a request: its own shape, or the policy of its kind of step."""

from __future__ import annotations

from collections.abc import Callable

from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.host_proposal import WaitForTokens
from specbuild.runtime.draft.policy import ChosenDraft, DraftPolicy, FixedPolicy, StepOutcome
from specbuild.runtime.draft.tree import check_shape
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.errors import RequestError


class PolicyByLogits:
    """One policy for steps with full logits and one for steps without: their times differ.

    ``make(full_logits)`` creates a policy on first use.
    """

    def __init__(self, make: Callable[[bool], DraftPolicy]) -> None:
        self._make = make
        self._by_kind: dict[bool, DraftPolicy] = {}
        self._last: DraftPolicy | None = None

    @property
    def max_depth(self) -> int:
        """Return the largest depth; it is equal for both kinds."""
        return self._policy_of(full_logits=False).max_depth

    @property
    def reason(self) -> str:
        """Return the reason of the last step's policy."""
        return (self._last or self._policy_of(full_logits=False)).reason

    def shape(self, step_context: StepContext) -> ChosenDraft | WaitForTokens:
        """Return the choice of the policy for this kind of step."""
        self._last = self._policy_of(full_logits=step_context.full_logits)
        return self._last.shape(step_context)

    def observe(self, outcome: StepOutcome) -> None:
        """Pass the outcome to the policy of its kind."""
        self._policy_of(full_logits=outcome.step_context.full_logits).observe(outcome)

    def _policy_of(self, *, full_logits: bool) -> DraftPolicy:
        if full_logits not in self._by_kind:
            self._by_kind[full_logits] = self._make(full_logits)
        return self._by_kind[full_logits]


def requested_policy(shape: DraftShape | None) -> FixedPolicy:
    """Return the policy of a request with its own shape; None decodes without a draft."""
    if shape is None:
        return FixedPolicy(None, max_depth=0, reason="requested without a draft")
    return FixedPolicy(shape, max_depth=shape.draft_depth, reason="requested")


def require_shape(shape: DraftShape, manifest: Manifest) -> None:
    """Raise RequestError if the engine has no draft, or if the shape exceeds its limits."""
    if not manifest.drafters:
        raise RequestError(
            "the request has a draft shape, but the engine was built without a draft; omit it"
        )
    check_shape(shape, manifest.limits)
