"""What a device is told of the sequences that change logits, or want the likeliest tokens.

They decode apart from the others, in steps without a draft: a penalty changes with every token, and
what a guide allows is known when the token before it is. Where a guide is all, they do so behind a
refused token only (``guide_checks.py``). The rules are those of ``logit_rows.py``.
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
    IN_PROMPT,
    MASKED_ROW,
)
from specbuild.runtime.executors.executor import DeviceExecutor
from specbuild.runtime.request import SequenceState, TopLogprobs

_TOP = ("top_ids", "top_logprobs")
# What the device is to do to a row of logits; every row has it, 0 for nothing.
CHANGES = "changes"
# Of a sequence that decodes apart: what goes with it to another row.
_SCALARS = (
    "min_position",
    "top_count",
    "repetition",
    "frequency",
    "presence",
)
COLUMNS = (*_SCALARS, "bias", "marks", "mask")


def uses_processor_steps(sequence: SequenceState) -> bool:
    """Whether steps that change logits may decode a sequence."""
    return sequence.request.params.adjusts_steps is not None


def done_port(sequence: SequenceState) -> str:
    """The port that says whether steps of its kind pass a sequence over."""
    return ADJUSTED_DONE if sequence.uses_logit_processor else "done"


class LogitProcessorRows:
    """Writes the rows of sequences that decode apart, behind the launches in flight."""

    def __init__(self, executor: DeviceExecutor, eos_token_ids: Collection[int]) -> None:
        self._executor = executor
        self._eos_token_ids = eos_token_ids
        bias, mask = executor.port("bias"), executor.port("mask")
        self._vocab = 0 if bias is None else bias.shape[1]
        self._words = 0 if mask is None else mask.shape[1]

    def begin(self, sequence: SequenceState, row: int) -> None:
        """A sequence's prompt is about to end in this row: nothing of its output is there."""
        params = sequence.request.params
        sampling, prompt = params.sampling, sequence.request.ids
        values: dict[str, float] = {
            "min_position": len(prompt) + params.min_tokens - 1 if params.min_tokens else 0,
            "top_count": params.top_logprobs,
            "repetition": sampling.repetition_penalty,
            "frequency": sampling.frequency_penalty,
            "presence": sampling.presence_penalty,
        }
        for name, value in values.items():
            self._executor.fill(name, value, row=row)
        if params.adjusts_logits:
            self._write("bias", self._biases(sequence), row)
            self._write("marks", self._marks(sequence), row)
        self.write_mask(sequence, row)

    def write_mask(self, sequence: SequenceState, row: int) -> None:
        """In front of a launch: what its guide allows behind the tokens so far, if it has one."""
        changes = ADJUSTS if sequence.request.params.adjusts_logits else 0
        mask = None if sequence.guide is None else sequence.guide.mask(sequence.output)
        if mask is not None:
            self._executor.write("mask", mask.words(self._words)[None], row=row)
            changes |= MASKED_ROW
        self._executor.fill(CHANGES, changes, row=row)

    def choose_first_tokens(
        self, finishing: Sequence[PromptRows], programs: ProgramTable
    ) -> RowTopLogprobs | None:
        """Behind a launch of prompts: these choose their first tokens once more."""
        for r in finishing:
            self.begin(r.sequence, r.row)
        self._executor.start(programs.first_token_processor)
        return self.fetch_top_logprobs(r.sequence for r in finishing)

    def fetch_top_logprobs(self, sequences: Iterable[SequenceState]) -> RowTopLogprobs | None:
        """Right behind a launch: its likeliest tokens, where one of these sequences wants some."""
        if not any(sequence.request.params.top_logprobs for sequence in sequences):
            return None
        ids, logprobs = (self._executor.fetch(name) for name in _TOP)
        return RowTopLogprobs(ids, logprobs)

    def _biases(self, sequence: SequenceState) -> np.ndarray:
        ids, biases = sequence.request.params.sampling.bias_arrays
        row = np.zeros(self._vocab, np.float32)
        row[ids] = biases
        return row

    def _marks(self, sequence: SequenceState) -> np.ndarray:
        row = np.zeros(self._vocab, np.int32)
        row[sequence.request.ids] |= IN_PROMPT
        row[ends_of(sequence.request.params, self._eos_token_ids, self._vocab)] |= ENDS_OUTPUT
        return row

    def _write(self, name: str, values: np.ndarray, row: int) -> None:
        """Most rows are zeros, which need no copy."""
        if values.any():
            self._executor.write(name, values[None], row=row)
        else:
            self._executor.fill(name, 0, row=row)


class RowTopLogprobs:
    """The likeliest tokens that a launch lists, on their way from the device."""

    def __init__(self, ids: Callable[[], np.ndarray], logprobs: Callable[[], np.ndarray]) -> None:
        self._pending = (ids, logprobs)
        self._fetched: tuple[np.ndarray, np.ndarray] | None = None

    def get(self, sequence: SequenceState, row: int) -> Sequence[TopLogprobs]:
        """What the launch lists for a sequence that stood in ``row``: nothing if it wants none."""
        count = sequence.request.params.top_logprobs
        if count == 0:
            return ()
        if self._fetched is None:
            ids, logprobs = self._pending
            self._fetched = ids(), logprobs()
        ids_of_row, logprobs_of_row = (array[row, :count] for array in self._fetched)
        is_listed = ids_of_row >= 0
        pairs = zip(
            ids_of_row[is_listed].tolist(), logprobs_of_row[is_listed].tolist(), strict=True
        )
        return (tuple(pairs),)
