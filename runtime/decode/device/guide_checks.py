"""Guided sequences in the steps of the others: their guides check the tokens when they arrive.

A step is queued before the mask of its tokens can be known, so a guided sequence decodes as if it
had none. A choice that its guide allows is the choice of masked decoding, for it is the largest
score of all tokens, and a mask only takes others away. At the first that is refused, the sequence
goes back: what stood before the token is the state again, and a step of its own chooses it behind a
mask. Steps that were queued meanwhile began behind the refused token: they are stale for it.

Going back is a few writes, queued as all changes of rows are, behind those steps. Keys and values
behind the length are written again before a row sees them. Of the draft's, those of the tokens that
were kept were made of the right pairs; the newest one's wants the masked token beside it, and waits
for the draft when the masked step is through.

A masked step gives one token, and the next waits for it where it is masked too; a refusal costs the
step that it was found in, and those behind: two tokens make up for it. So where refusals follow
each other, twice as many masked steps come behind each, and two tokens that are allowed take one
back: apart where one token alone may come, and where several may. A model that does not know the
form is so led through it, and left free in the texts between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specbuild.runtime.decode.device.rows import DeviceRows
from specbuild.runtime.request import SequenceState

# A refusal weighs as much as so many tokens that are allowed.
_REFUSAL_WEIGHT = 2
# Behind 32 masked steps, whatever was before, a step shows what the model has learned.
_MAX_REFUSAL_WEIGHT = 6 * _REFUSAL_WEIGHT


@dataclass(slots=True)
class _CheckedSequence:
    """Of one sequence: ``waiting`` of its tokens wait for the draft behind what was received.

    Where several tokens may come, and where one alone: by how much refusals outweigh what was
    allowed there, and the masked steps still to come.
    """

    pending: int = 1
    refusal_weight: list[int] = field(default_factory=lambda: [0, 0])
    masked_steps: list[int] = field(default_factory=lambda: [0, 0])


@dataclass(frozen=True)
class ReceivedStep:
    """What a step gave a sequence, which may have been a ``masked`` one.

    ``extends``: the draft took up in it what waited before. ``extends_behind``: so it does in one
    of those that are in flight behind it.
    """

    tokens: Sequence[int]
    masked: bool
    extends: bool
    extends_later: bool


class GuideChecks:
    """Called around the launches of sequences that only a guide changes anything of.

    ``drafted``: what their steps commit is for the draft to take up, masked steps too.
    """

    def __init__(self, rows: DeviceRows, *, has_draft: bool) -> None:
        self._rows = rows
        self.has_draft = has_draft
        self._checked: dict[int, _CheckedSequence] = {}

    def __contains__(self, sequence: SequenceState) -> bool:
        return sequence.index in self._checked

    def admit(self, sequence: SequenceState) -> None:
        """A sequence takes part in the steps of the others."""
        assert sequence.guide is not None
        sequence.guide.stays_here = True
        self._checked[sequence.index] = _CheckedSequence()

    def release(self, sequence: SequenceState) -> None:
        """It is done, or begins again."""
        self._checked.pop(sequence.index, None)

    def after_masked_step(self, sequences: Iterable[SequenceState]) -> None:
        """That is queued: who needs no second one is with the others again, whatever it gives."""
        for sequence in sequences:
            checked = self._checked.get(sequence.index)
            if checked is not None and not any(checked.masked_steps):
                self._rows.set_step_kind(sequence, uses_logit_processor=False)

    def received(self, sequence: SequenceState, step: ReceivedStep) -> int:
        """How many of a step's tokens stand; the sequence's next step is one behind them."""
        checked, tokens = self._checked[sequence.index], step.tokens
        assert sequence.guide is not None
        if sequence.guide.failure is not None:
            return 0
        pending = 0 if step.extends else checked.pending
        checked.pending = pending + len(tokens)
        if step.masked:
            # Where it still is apart, another masked step may come behind it.
            if sequence.uses_logit_processor and not _use_masked_step(
                checked, _is_forced(sequence, tokens)
            ):
                self._rows.set_step_kind(sequence, uses_logit_processor=False)
            return len(tokens)
        num_allowed, rolls_back = self._check_tokens(sequence, checked, tokens)
        if rolls_back:
            # Steps that take up what waits pass over who is done, if only by a refused end.
            is_ingested = step.extends_later and not self._rows.ends_with(sequence, tokens)
            checked.pending = 0 if is_ingested else pending + num_allowed
            self._roll_back(sequence, tokens[:num_allowed], checked.pending)
        return num_allowed

    def _check_tokens(
        self, sequence: SequenceState, checked: _CheckedSequence, tokens: Sequence[int]
    ) -> tuple[int, bool]:
        """How many tokens are those of masked decoding, and whether a masked step comes next."""
        guide, output = sequence.guide, sequence.output
        assert guide is not None
        for num_allowed, token in enumerate(tokens):
            allows = guide.allows(_appended(output, tokens[:num_allowed]), token)
            if allows is None:
                # The output is complete, or nothing is known of what may follow.
                return num_allowed if guide.failure else len(tokens), False
            if allows and not any(checked.refusal_weight):
                continue
            forced = _is_forced(sequence, tokens[:num_allowed])
            if not allows:
                refusal_weight = min(
                    checked.refusal_weight[forced] + _REFUSAL_WEIGHT, _MAX_REFUSAL_WEIGHT
                )
                checked.refusal_weight[forced] = refusal_weight
                checked.masked_steps[forced] = 1 << refusal_weight // _REFUSAL_WEIGHT - 1
                return num_allowed, _use_masked_step(checked, forced)
            checked.refusal_weight[forced] = max(0, checked.refusal_weight[forced] - 1)
        takes_masked_step = any(checked.masked_steps) and _use_masked_step(
            checked, _is_forced(sequence, tokens)
        )
        return len(tokens), takes_masked_step

    def _roll_back(self, sequence: SequenceState, num_allowed: Sequence[int], pending: int) -> None:
        """To the newest token that stands."""
        sequence.discarded_steps = sequence.steps_in_flight
        length = sequence.num_tokens - 1 + len(num_allowed)
        root = num_allowed[-1] if num_allowed else sequence.root
        self._rows.roll_back(sequence, length, root, pending if self.has_draft else None)
        self._rows.set_step_kind(sequence, uses_logit_processor=True)


def _is_forced(sequence: SequenceState, tokens: Sequence[int]) -> bool:
    """Whether one token alone may follow the output and ``tokens``."""
    assert sequence.guide is not None
    return bool(sequence.guide.forced(_appended(sequence.output, tokens)))


def _appended(output: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    return np.concatenate([output, np.array(tokens, np.int32)])


def _use_masked_step(checked: _CheckedSequence, forced: bool) -> bool:
    """Whether a masked step chooses the next token; it is one of those to come."""
    if not checked.masked_steps[forced]:
        return False
    checked.masked_steps[forced] -= 1
    return True
