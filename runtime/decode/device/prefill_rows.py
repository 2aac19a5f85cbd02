"""The input arrays of prefill launches on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbuild.runtime.engine_dir.drafters.registry import DRAFT_GROUPS
from specbuild.runtime.engine_dir.plan import ProgramEntry, draft_write_slot
from specbuild.runtime.request import SequenceState
from specbuild.runtime.sampling import CHOOSE_INPUTS


@dataclass(frozen=True)
class PromptRows:
    """Tokens ``start … start + count − 1`` of the sequence in ``row``."""

    row: int
    sequence: SequenceState
    start: int
    count: int


def prefill_arrays(
    rows: Sequence[PromptRows], entry: ProgramEntry, groups: Sequence[str], *, has_draft: bool
) -> dict[str, np.ndarray]:
    """Return the ``prefill.`` ports of a launch: tokens by sequence row, then padding.

    Padding rows have token 0 at position 0, in page 0, which is never read. A draft row pairs the
    aux hidden states of a token with the next token. The last token has no successor yet, so its
    draft row is padding. Logits are computed at the last row of each sequence.
    """
    rows = sorted(rows, key=lambda r: r.row)
    total, batch = sum(r.count for r in rows), entry.batch
    drafts = [group for group in groups if group in DRAFT_GROUPS] if has_draft else []
    row_names = ["token_ids", "positions"]
    row_names += [f"write_slot.{g}" for g in groups if g not in DRAFT_GROUPS]
    row_names += ["draft_token_ids", *map(draft_write_slot, drafts)] if drafts else []
    arrays = {name: np.zeros(entry.rows, np.int32) for name in row_names}
    count, tree_start, logit_rows = np.zeros((3, batch), np.int32)
    first = 0
    for r in rows:
        launch_rows, span = slice(first, first + r.count), slice(r.start, r.start + r.count)
        arrays["token_ids"][launch_rows] = r.sequence.ids[span]
        arrays["positions"][launch_rows] = np.arange(r.start, r.start + r.count)
        for group in groups:
            if group not in DRAFT_GROUPS:
                arrays[f"write_slot.{group}"][launch_rows] = r.sequence.pages[group].slots[span]
        if drafts:
            num_draft_rows = min(r.count, r.sequence.num_tokens - 1 - r.start)
            draft_rows, source = (
                slice(first, first + num_draft_rows),
                slice(r.start, r.start + num_draft_rows),
            )
            after = slice(source.start + 1, source.stop + 1)
            arrays["draft_token_ids"][draft_rows] = r.sequence.ids[after]
            for group in drafts:
                slots_of_draft = r.sequence.pages[group].slots
                arrays[draft_write_slot(group)][draft_rows] = slots_of_draft[source]
        first += r.count
        count[r.row], tree_start[r.row] = r.count, r.start + r.count
        logit_rows[r.row] = first - 1
    assert first == total <= entry.rows
    arrays["row_start"] = np.concatenate([[0], np.cumsum(count)]).astype(np.int32)
    arrays["tree_start"], arrays["logit_rows"] = tree_start, logit_rows
    # A view begins at position 0 in every group, so a row's slot is its position.
    arrays["row_slot"] = arrays["positions"]
    return {f"prefill.{name}": array for name, array in arrays.items()}


def sampling_arrays(
    rows: Sequence[PromptRows], entry: ProgramEntry, *, floors: bool
) -> dict[str, np.ndarray]:
    """Return the ``prefill.`` ports with the sampling parameters of each row.

    Other rows are greedy. ``floors``: the engine has min-p.
    """
    inputs = {name: CHOOSE_INPUTS[name] for name in CHOOSE_INPUTS if floors or name != "floor"}
    arrays = {
        name: np.full(entry.batch, choose_input.neutral, choose_input.dtype)
        for name, choose_input in inputs.items()
    }
    arrays["position"] = np.zeros(entry.batch, np.int32)
    for r in rows:
        sampling = r.sequence.request.params.sampling
        for name, choose_input in inputs.items():
            arrays[name][r.row] = getattr(sampling, choose_input.attribute)
        arrays["position"][r.row] = r.start + r.count - 1
    return {f"prefill.{name}": array for name, array in arrays.items()}
