"""Which policy requests get: the draft that they ask for, or what steps of their kind teach.

What greedy steps teach says little of sampled ones.
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
    """One policy for each kind of step: with or without sampled rows, with or without full logits.

    ``make(sampled, full_logits)`` gives one when its kind is first met.
    """

    def __init__(self, make: Callable[[bool, bool], DraftPolicy]) -> None:
        self._make = make
        self._by_kind: dict[tuple[bool, bool], DraftPolicy] = {}
        self._last: DraftPolicy | None = None

    @property
    def max_depth(self) -> int:
        """The deepest draft of steps that neither sample nor want full logits: of any, then."""
        return self._of(sampled=False, full_logits=False).max_depth

    @property
    def reason(self) -> str:
        """That of the last step's policy."""
        return (self._last or self._of(sampled=False, full_logits=False)).reason

    def shape(self, step_context: StepContext) -> ChosenDraft | WaitForTokens:
        """The choice of the policy for such steps."""
        self._last = self._of(sampled=step_context.sampled, full_logits=step_context.full_logits)
        return self._last.shape(step_context)

    def observe(self, outcome: StepOutcome) -> None:
        """Only the policy of such steps learns."""
        kind = outcome.step_context
        self._of(sampled=kind.sampled, full_logits=kind.full_logits).observe(outcome)

    def _of(self, *, sampled: bool, full_logits: bool) -> DraftPolicy:
        kind = (sampled, full_logits)
        if kind not in self._by_kind:
            self._by_kind[kind] = self._make(*kind)
        return self._by_kind[kind]


def asked_for(shape: DraftShape | None) -> FixedPolicy:
    """The policy of a call that names its draft; None decodes without one."""
    if shape is None:
        return FixedPolicy(None, max_depth=0, reason="asked for no draft")
    return FixedPolicy(shape, max_depth=shape.draft_depth, reason="asked for")


def require_shape(shape: DraftShape, manifest: Manifest) -> None:
    """RequestError where the engine has no draft, or was built for smaller ones."""
    if not manifest.drafters:
        raise RequestError("a draft shape is given, but the engine was built without a draft")
    check_shape(shape, manifest.limits)
