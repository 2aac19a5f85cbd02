"""Optimistic decoding with guides: ordinary steps decode, and guides check the tokens afterwards.

A step is queued before the masks of its tokens are known, so a sequence with a guide is decoded
without masks. A mask only removes tokens. So a token that the guide allows is also the token of
masked decoding. At the first token that the guide refuses, the sequence is rolled back to the token
before, and a masked step chooses the next one. Steps that were queued in the meantime are discarded
for this sequence.

A masked step is an ordinary step that masks the root of some sequences. It may draft: what follows
the root is checked like the tokens of other steps. In older engines it is a separate step of one
row per sequence.

A rollback consists of a few writes, queued after those steps. Keys and values beyond the length are
overwritten before a row reads them. The draft's entries of allowed tokens are valid. The entry of
the newest token depends on the masked token, so the draft ingests it after the masked step. If it
has ingested all others, nothing is left from which it could draft in the masked step. Its tokens
there are arbitrary, and are verified as always.

A second masked step cannot start before the first is received. A refusal costs the rest of its step
and the steps in flight, which takes about as long as two masked steps. So each refusal in a row
doubles the number of masked steps that follow, and two allowed tokens undo one refusal. This is
counted separately for positions where the guide allows a single token. So a model that misses the
fixed parts of a format still decodes the free parts in ordinary steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from specbuild.runtime.decode.device.processor_rows import LogitProcessorRows
from specbuild.runtime.decode.device.rows import DeviceRows
from specbuild.runtime.guides.grammar import CheckedTokens
from specbuild.runtime.request import SequenceState

# One refusal weighs as much as this many allowed tokens.
_REFUSAL_WEIGHT = 2
# Limits the masked steps in a row to 32. Then an ordinary step is tried again.
_MAX_REFUSAL_WEIGHT = 6 * _REFUSAL_WEIGHT


@dataclass(slots=True)
class _CheckedSequence:
    """The guide state of a sequence, whose draft lacks its last ``pending`` tokens.

    ``has_chain``: a step in flight has a chain of forced tokens. ``forced`` are the tokens that
    must follow the output; None if the check of the last tokens did not find them.
    ``refusal_weight`` is the weight of recent refusals, ``masked_steps`` the number of masked steps
    to come. Both have an entry for positions with several allowed tokens, then one for positions
    with a single allowed token.
    """

    pending: int = 1
    has_chain: bool = False
    forced: Sequence[int] | None = None
    refusal_weight: list[int] = field(default_factory=lambda: [0, 0])
    masked_steps: list[int] = field(default_factory=lambda: [0, 0])


class ReceivedStep(NamedTuple):
    """The tokens of one sequence from a step. The first ``num_masked`` of them were masked.

    ``extends``: the draft ingested pending tokens in this step. ``extends_later``: it does so in a
    step in flight.
    """

    tokens: Sequence[int]
    num_masked: int
    extends: bool
    extends_later: bool


class KeptTokens(NamedTuple):
    """How many tokens of a step are kept.

    ``completes``: whether the last one completes the output; None if the guide was not asked.
    """

    num_kept: int
    completes: bool | None = None


class GuideChecks:
    """Checks sequences that only need a guide, around their launches.

    ``has_draft``: the draft ingests the tokens of all steps, including masked ones.
    ``shares_steps``: masked steps are ordinary steps. ``extends``: in separate masked steps, the
    draft can ingest pending tokens.
    """

    def __init__(
        self,
        rows: DeviceRows,
        processors: LogitProcessorRows,
        *,
        has_draft: bool,
        shares_steps: bool,
        extends: bool,
    ) -> None:
        self._rows = rows
        self._processors = processors
        self.has_draft = has_draft
        self._shares_steps = shares_steps
        # A rollback ignores keys and values of refused tokens; recurrent states have taken them in.
        can_follow = shares_steps or extends or not has_draft
        self._can_check = can_follow and not rows.has_states
        self._checked: dict[int, _CheckedSequence] = {}

    def __len__(self) -> int:
        return len(self._checked)

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, SequenceState) and sequence.index in self._checked

    def admit(self, sequence: SequenceState) -> None:
        """Check a sequence if a choice that its guide allows is the masked choice.

        It takes part in ordinary steps. Others need a mask for every token. So do those with remote
        guides: tokens that are decoded ahead cannot be checked before a mask arrives.
        """
        params, guide = sequence.request.params, sequence.guide
        checks = params.checks_guide if self._shares_steps else params.only_guided
        if guide is None or guide.is_remote or not (checks and self._can_check):
            return
        guide.stays_here = True
        self._checked[sequence.index] = _CheckedSequence()

    def release(self, sequence: SequenceState) -> None:
        """Stop checking a sequence that finished or was preempted."""
        self._checked.pop(sequence.index, None)

    def pending_of(self, sequence: SequenceState) -> int:
        """Return how many of a sequence's tokens the draft has not ingested."""
        return self._checked[sequence.index].pending

    def forced(self, sequence: SequenceState) -> Sequence[int]:
        """Return the tokens that must follow the output, if a chain of them gains a token.

        A chain discards the steps in flight, of which the first has chosen one token, perhaps the
        right one.
        """
        checked = self._checked.get(sequence.index)
        if not self._shares_steps or checked is None or checked.has_chain:
            return ()
        if not sequence.num_output_tokens:
            return ()
        assert sequence.guide is not None
        tokens = checked.forced
        if tokens is None:
            tokens = checked.forced = sequence.guide.forced(sequence.output)
        gains = len(tokens) > 1 or not sequence.valid_steps_in_flight or checked.refusal_weight[1]
        return tokens if gains else ()

    def before_step(
        self,
        rows: Mapping[int, SequenceState],
        chains: Mapping[int, Sequence[int]] | None,
        ingests: Callable[[SequenceState], bool],
    ) -> dict[int, int]:
        """Mask rows of an ordinary step where needed, and let chains of forced tokens decide.

        Return how many tokens of a row were forced or masked, for rows with such tokens. A mask
        takes the host longer than anything else does. The guide allows several tokens after a
        chain, so that place has a mask only if the guide recently refused a token at such a place.
        ``ingests``: the draft ingests the pending tokens of a sequence in a step in flight.
        """
        num_masked: dict[int, int] = {}
        if not self._checked:
            return num_masked
        for row, sequence in rows.items():
            checked = self._checked.get(sequence.index)
            chain = () if chains is None else chains[row]
            if checked is None or not (sequence.needs_mask or len(chain)):
                continue
            discards = sequence.valid_steps_in_flight > 0
            if discards:
                checked.pending = 0 if ingests(sequence) else checked.pending
                self._roll_back(sequence, (), checked.pending)
            is_masked = bool(checked.refusal_weight[0]) or (sequence.needs_mask and not len(chain))
            self._processors.write_mask(sequence, row, chain, masks=is_masked)
            if discards or sequence.needs_mask:
                # A discarded step may have ended the output.
                self._rows.set_needs_mask(sequence, needs_mask=False)
            checked.has_chain = bool(len(chain))
            num_masked[row] = len(chain) + is_masked
        return num_masked

    def after_step(self, sequences: Iterable[SequenceState]) -> None:
        """Return sequences to ordinary steps, but those whose next step is masked too."""
        for sequence in sequences:
            checked = self._checked.get(sequence.index)
            if checked is None:
                continue
            is_last = not any(checked.masked_steps)
            if not self._shares_steps:
                if is_last:
                    self._rows.set_step_kind(sequence, uses_logit_processor=False)
                continue
            self._processors.clear_mask(sequence, self._rows.row_of(sequence))
            if not is_last:
                self._rows.set_needs_mask(sequence, needs_mask=True)

    def received(self, sequence: SequenceState, step: ReceivedStep) -> KeptTokens:
        """Return how many tokens the guide allows; roll the sequence back if it refuses one."""
        checked, tokens, guide = self._checked[sequence.index], step.tokens, sequence.guide
        checked.has_chain, checked.forced = False, None
        assert guide is not None
        if guide.failure is not None:
            return KeptTokens(0)
        pending = 0 if step.extends else checked.pending
        # A step with a host proposal may emit more than the draft's buffer holds.
        checked.pending = min(pending + len(tokens), self._rows.max_pending)
        if step.num_masked and not self._shares_steps:
            # If the sequence still uses masked steps, another one may follow.
            if sequence.uses_logit_processor and not _use_masked_step(
                checked, _is_forced(sequence, tokens)
            ):
                self._rows.set_step_kind(sequence, uses_logit_processor=False)
            return KeptTokens(len(tokens))
        result = guide.check(sequence.output, tokens)
        num_allowed = result.num_allowed
        if guide.failure is not None:
            return KeptTokens(num_allowed)
        checked.forced = result.forced
        needs_mask = _takes_masked_step(checked, result, step.num_masked)
        if sequence.needs_mask and num_allowed == len(tokens):
            # Nothing that counts is in flight after a masked step that more follow.
            self._rows.set_needs_mask(sequence, needs_mask=needs_mask)
        elif needs_mask:
            # Steps that ingest pending tokens skip a finished sequence, even if the guide refused
            # its end.
            is_ingested = step.extends_later and not self._rows.ends_with(sequence, tokens)
            # The buffer holds the newest tokens, of which the refused ones are the last.
            num_refused = len(tokens) - num_allowed
            checked.pending = 0 if is_ingested else max(checked.pending - num_refused, 0)
            self._roll_back(sequence, tokens[:num_allowed], checked.pending)
            if self._shares_steps:
                self._rows.set_needs_mask(sequence, needs_mask=True)
            else:
                self._rows.set_step_kind(sequence, uses_logit_processor=True)
        return KeptTokens(num_allowed, result.is_complete)

    def _roll_back(
        self, sequence: SequenceState, allowed_tokens: Sequence[int], pending: int
    ) -> None:
        """Roll the sequence back to the newest allowed token."""
        sequence.discarded_steps = sequence.steps_in_flight
        length = sequence.num_tokens - 1 + len(allowed_tokens)
        root = allowed_tokens[-1] if allowed_tokens else sequence.root
        self._rows.roll_back(sequence, length, root, pending if self.has_draft else None)
        self._processors.recount(sequence, self._rows.row_of(sequence), allowed_tokens)


def _is_forced(sequence: SequenceState, tokens: Sequence[int]) -> bool:
    """Return whether the guide allows only one token after the output and ``tokens``."""
    assert sequence.guide is not None
    return bool(sequence.guide.forced(_appended(sequence.output, tokens)))


def _appended(output: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    if not len(tokens):
        return output
    return np.concatenate([output, np.array(tokens, np.int32)])


def _takes_masked_step(checked: _CheckedSequence, result: CheckedTokens, num_masked: int) -> bool:
    """Update the weight of refusals; return whether a masked step follows."""
    num_allowed, weight = result.num_allowed, checked.refusal_weight
    if any(weight):
        # That a mask allows a token says nothing of the model's choice.
        for is_only in result.is_only[num_masked:num_allowed]:
            weight[is_only] = max(0, weight[is_only] - 1)
    if result.is_refused:
        is_only = result.is_only[num_allowed]
        weight[is_only] = min(weight[is_only] + _REFUSAL_WEIGHT, _MAX_REFUSAL_WEIGHT)
        checked.masked_steps[is_only] = 1 << weight[is_only] // _REFUSAL_WEIGHT - 1
        return _use_masked_step(checked, is_only)
    if result.is_complete or not any(checked.masked_steps):
        return False
    return _use_masked_step(checked, bool(result.forced))


def _use_masked_step(checked: _CheckedSequence, forced: bool) -> bool:
    """Return whether the next token needs a masked step, and count that step."""
    if not checked.masked_steps[forced]:
        return False
    checked.masked_steps[forced] -= 1
    return True
