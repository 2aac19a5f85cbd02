"""What steps of several draft models are believed to cost where nobody has timed them."""

from __future__ import annotations

from collections.abc import Sequence

from specbuild.runtime.draft.device_costs import METHOD, ShapeCosts, StepCosts
from specbuild.runtime.draft.draft_models import model_of
from specbuild.runtime.engine_dir.manifest import DraftShape

# A step without a draft, and how much longer one with any is: a run's own times soon say better.
PLAIN_S = 2e-3
DRAFTED = 1.8


def believed_costs(shapes: Sequence[DraftShape], *, batch: int) -> StepCosts:
    """A table of steps without a draft and with each of ``shapes``, for up to ``batch`` sequences.

    All drafts cost alike, so that at first what is accepted decides among them.
    """
    steps = [ShapeCosts(batch, 0, 0, 0, (0,), (PLAIN_S,), (0.0,))]
    steps += [
        ShapeCosts(
            batch, s.draft_top_k, s.draft_depth, s.draft_tokens,
            (0,), (DRAFTED * PLAIN_S,), (0.0,), drafter=model_of(s),
        )
        for s in shapes
    ]  # fmt: skip
    return StepCosts(gpu="", programs="", method=METHOD, steps=tuple(steps))
