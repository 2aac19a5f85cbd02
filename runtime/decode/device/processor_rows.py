"""Device state of sequences that use logit processors or request the most likely tokens.

Every step that writes full logits applies logit processors, to each row by the tokens on its path.
A mask depends on the token before, so sequences that need masks decode in logit-processor steps,
separately and without a draft. Sequences that only have a guide use these steps after a refused
token (``guide_checks.py``). Older engines apply all logit processors in logit-processor steps. The
rules are those of ``logit_rows.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from specbuild.runtime.decode.device.prefill_rows import PromptRows
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.decode.logit_rows import ends_of
from specbuild.runtime.engine_dir.plan import (
    ADJUSTED_DONE,
    ADJUSTS,
    ENDS_OUTPUT,
    FIRST_ROWS,
    FORCED,
    FORCED_ROWS,
    IN_PROMPT,
    MASKED_ROW,
    TOP_PATH,
    ProgramEntry,
)
from specbuild.runtime.executors.executor import DeviceExecutor
from specbuild.runtime.request import SequenceState, TopLogprobs

_TOP = ("top_ids", "top_logprobs")
# The port that selects the logit processors of a row; 0 for none.
CHANGES = "changes"
# The port with the number of most likely tokens that a row lists.
TOP_COUNT = "top_count"
# State of a sequence that moves with it to another row, besides these two.
_SCALARS = (
    "min_position",
    "repetition",
    "frequency",
    "presence",
)
COLUMNS = (*_SCALARS, "bias", "marks", "mask")


def uses_processor_steps(sequence: SequenceState) -> bool:
    """Return whether the request has logit-processor state, or may need it."""
    return sequence.request.params.adjusts_steps is not None


def unmasked_changes(sequence: SequenceState) -> int:
    """Return the port ``changes`` of a sequence in a step without a mask."""
    return ADJUSTS if sequence.request.params.adjusts_logits else 0


def needs_full_logits(sequences: Iterable[SequenceState]) -> bool:
    """Return whether an ordinary step of these sequences must write full logits."""
    return bool([s for s in sequences if s.needs_mask or s.needs_full_logits])


def done_port(sequence: SequenceState) -> str:
    """Return the port that excludes the sequence from steps of its kind."""
    return ADJUSTED_DONE if sequence.uses_logit_processor else "done"


class LogitProcessorRows:
    """Writes the logit-processor state of sequences, after the launches in flight."""

    def __init__(self, executor: DeviceExecutor, eos_token_ids: Collection[int]) -> None:
        self._executor = executor
        self._eos_token_ids = eos_token_ids
        bias, mask = executor.port("bias"), executor.port("mask")
        self._vocab = 0 if bias is None else bias.shape[1]
        self._words = 0 if mask is None else mask.shape[1]

    def begin(self, sequence: SequenceState, row: int) -> None:
        """Write the state of a sequence whose prompt ends in the next launch."""
        params = sequence.request.params
        sampling, prompt = params.sampling, sequence.request.ids
        values: dict[str, float] = {
            "min_position": len(prompt) + params.min_tokens - 1 if params.min_tokens else 0,
            TOP_COUNT: params.top_logprobs,
            "repetition": sampling.repetition_penalty,
            "frequency": sampling.frequency_penalty,
            "presence": sampling.presence_penalty,
        }
        for name, value in values.items():
            self._executor.fill(name, value, row=row)
        if params.adjusts_logits:
            self._write("bias", sampling.bias_row(self._vocab), row)
            self._write("marks", self._marks(sequence), row)
        self.write_mask(sequence, row)

    def write_mask(
        self,
        sequence: SequenceState,
        row: int,
        chain: Sequence[int] = (),
        *,
        masks: bool = True,
    ) -> None:
        """Write the mask of the next token, before a launch.

        With a ``chain`` of forced tokens, which the launch verifies, it is that of the token after
        them. Without ``masks`` that token is not masked.
        """
        changes, guide, output = unmasked_changes(sequence), sequence.guide, sequence.output
        if len(chain):
            output = np.concatenate([output, np.array(chain, np.int32)])
            self._executor.fill(FORCED, len(chain), row=row)
            changes |= FORCED_ROWS
        mask = None if guide is None or not masks else guide.mask(output)
        if mask is not None:
            self._executor.write("mask", mask.words(self._words)[None], row=row)
            changes |= MASKED_ROW
        self._executor.fill(CHANGES, changes, row=row)

    def recount(self, sequence: SequenceState, row: int, new_tokens: Sequence[int]) -> None:
        """Count the output again after a rollback, with ``new_tokens`` that it does not have yet.

        The newest token is the root, which the next step counts.
        """
        if sequence.request.params.adjusts_logits:
            output = np.concatenate([sequence.output, np.array(new_tokens, np.int32)])
            marks = self._marks(sequence)
            np.add.at(marks, output[:-1], 1)
            self._write("marks", marks, row)

    def clear_mask(self, sequence: SequenceState, row: int) -> None:
        """Let steps after the last launch apply no mask to a sequence."""
        self._executor.fill(CHANGES, unmasked_changes(sequence), row=row)

    def choose_first_tokens(
        self, finishing: Sequence[PromptRows], programs: ProgramTable
    ) -> RowTopLogprobs | None:
        """Choose the first tokens of finished prompts again, with logit processors."""
        for r in finishing:
            self.begin(r.sequence, r.row)
        self._executor.start(programs.first_token_processor)
        for r in finishing:
            self.clear_mask(r.sequence, r.row)
        entry = programs.first_token_processor
        return self.fetch_top_logprobs((r.sequence for r in finishing), entry)

    def fetch_top_logprobs(
        self, sequences: Iterable[SequenceState], entry: ProgramEntry
    ) -> RowTopLogprobs | None:
        """Fetch the most likely tokens of the last launch; None if no sequence requests them."""
        # Full logits are needed for them.
        if not [s for s in sequences if s.needs_full_logits and s.request.params.top_logprobs]:
            return None
        ids, logprobs = (self._executor.fetch(name) for name in _TOP)
        path = self._executor.fetch(TOP_PATH) if entry.draft_depth else None
        first_rows = self._executor.fetch(FIRST_ROWS) if entry.is_ragged else None
        return RowTopLogprobs(entry, ids, logprobs, path, first_rows)

    def _marks(self, sequence: SequenceState) -> np.ndarray:
        row = np.zeros(self._vocab, np.int32)
        row[sequence.request.ids] |= IN_PROMPT
        row[ends_of(sequence.request.params, self._eos_token_ids, self._vocab)] |= ENDS_OUTPUT
        return row

    def _write(self, name: str, values: np.ndarray, row: int) -> None:
        """Write a row. Most rows are zeros and need no copy."""
        if values.any():
            self._executor.write(name, values[None], row=row)
        else:
            self._executor.fill(name, 0, row=row)


class RowTopLogprobs:
    """The most likely tokens of a launch of ``entry``. They arrive asynchronously from the device.

    ``path`` has the slots of the accepted paths, if the step verified drafts, and ``first_rows``
    the row of each sequence's slot 0, if it was ragged.
    """

    def __init__(
        self,
        entry: ProgramEntry,
        ids: Callable[[], np.ndarray],
        logprobs: Callable[[], np.ndarray],
        path: Callable[[], np.ndarray] | None,
        first_rows: Callable[[], np.ndarray] | None,
    ) -> None:
        self._entry = entry
        self._pending = (ids, logprobs, path, first_rows)
        self._fetched: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def get(self, sequence: SequenceState, row: int, num_tokens: int) -> Sequence[TopLogprobs]:
        """Return those of the sequence's first tokens; empty if it requests none."""
        count = sequence.request.params.top_logprobs
        if count == 0:
            return ()
        ids, logprobs, rows = self._received()
        lists = []
        for target_row in rows[row, :num_tokens].tolist():
            is_listed = ids[target_row, :count] >= 0
            listed = (array[target_row, :count][is_listed].tolist() for array in (ids, logprobs))
            lists.append(tuple(zip(*listed, strict=True)))
        return lists

    def _received(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Wait for the arrays. The last one is [B, tokens]: the target's row of each token."""
        if self._fetched is None:
            ids, logprobs, path, first_rows = self._pending
            entry = self._entry
            first = np.arange(entry.batch) * (entry.draft_tokens + 1)
            if first_rows is not None:
                first = first_rows()[: entry.batch]
            rows = first[:, None]
            if path is not None:
                slots = path()[: entry.batch * (entry.draft_depth + 1)]
                rows = rows + slots.reshape(entry.batch, -1)
            self._fetched = ids(), logprobs(), rows
        return self._fetched
