"""A window on the draft's own attention, and the message for drafts without any."""

from __future__ import annotations

from dataclasses import replace

from specbuild.builder.options import BuildOptions
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry
from specbuild.runtime.engine_dir.manifest import Limits
from specbuild.runtime.errors import SpecbuildError


def windowed_draft(draft: DraftGeometry, options: BuildOptions) -> DraftGeometry:
    """Return the draft with ``--draft-window`` on its own attention, if requested.

    A window changes the proposals of the draft, never the output.
    """
    window = options.drafting.window
    if window is None:
        return draft
    if draft.window_obstacle is not None:
        raise SpecbuildError(
            f"--draft-window {window}: {draft.window_obstacle} attends to every token; leave it out"
        )
    if draft.sliding_window and draft.sliding_window < window:
        raise SpecbuildError(
            f"--draft-window {window} is wider than the draft's own window of "
            f"{draft.sliding_window}; leave it out or ask for less"
        )
    return replace(draft, sliding_window=window)


def context_warnings(draft: DraftGeometry, limits: Limits) -> tuple[str, ...]:
    """Warn that a draft loses acceptance at positions beyond those of its training."""
    trained = draft.max_positions
    if trained is None or limits.max_seq_len <= trained or 0 < draft.sliding_window <= trained:
        return ()
    return (
        f"draft: trained on {trained} positions, the engine allows {limits.max_seq_len}; beyond "
        f"them fewer drafts are accepted (--draft-window {trained} keeps its attention within)",
    )
