"""Samples the target's token at each row, with logit processors and guides.

Drafts stay enabled with a guide. Every row is first sampled without a mask. Then the path of
accepted drafts is followed from the root. A sample that the guide allows is kept. A refused sample
is drawn again from the same row with a mask. No state is ever rolled back: at worst the path ends
where the mask chose another token than the draft.

The result equals masked decoding, one row at a time. A draw is the argmax of logits plus noise of
(seed, position), so a mask changes the draw only if it removes the drawn token. With top-k, top-p
or min-p, a mask also changes which tokens remain. Then each row of the path is masked first. Rows
outside the path need no mask.

Masking every row before sampling would give the same tokens, but it copies the logits of each row.
With 200 000 tokens the copy takes 0.8 ms. A lookup of one token in the mask takes a microsecond.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from specbuild.runtime.decode.logit_rows import adjust, log_probability
from specbuild.runtime.draft.tree import DraftTrees
from specbuild.runtime.executors.executor import Executor
from specbuild.runtime.guides.grammar import TokenMask
from specbuild.runtime.request import SequenceState
from specbuild.runtime.sampling import sampling_feeds


@dataclass(frozen=True)
class SampledRows:
    """Rows of a pass: ``count[b]`` of sequence b, at ``position`` [R], with ``logits`` [R, V].

    With ``trees``, the last rows of a sequence are those of its tree. The rows before belong to
    committed tokens.
    """

    sequences: Sequence[SequenceState]
    count: Sequence[int]
    position: np.ndarray
    logits: np.ndarray
    trees: DraftTrees | None = None

    def committed_rows(self, b: int) -> int:
        """Number of rows of sequence ``b`` before its tree; all rows if there are no trees."""
        count = self.count[b]
        return count if self.trees is None else count - int(self.trees.count[b])


class RowSampler:
    """Runs the role ``choose``."""

    def __init__(self, executor: Executor, eos_token_ids: Collection[int]) -> None:
        self._executor = executor
        self._eos_token_ids = eos_token_ids

    def sample(self, rows: SampledRows, *, counts: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Sample every row; return tokens and log-probabilities, both [R].

        ``counts``: masked tokens are added to the statistics.
        """
        logits = rows.logits
        before = _tokens_before(rows)
        changed = logits.copy() if before else logits
        for row, (sequence, tokens) in before.items():
            self._adjust(changed[row], sequence, tokens)
        choice, logprob = self._choose(rows, changed)
        guided = [b for b, s in enumerate(rows.sequences) if s.guide is not None]
        if before or guided:
            choice, logprob = choice.copy(), logprob.copy()
        for row in before:
            logprob[row] = log_probability(logits[row], choice[row])
        for b in guided:
            masked = _GuidedRows(self, rows, b, choice, logprob).mask_rows()
            if counts:
                rows.sequences[b].counters.mask(masked)
        return choice, logprob

    def sample_masked(
        self,
        rows: SampledRows,
        row: int,
        sequence: SequenceState,
        tokens: np.ndarray,
        mask: TokenMask,
    ) -> int:
        """Sample one row after ``tokens``, among the tokens that a mask allows."""
        if mask.only is not None:
            return mask.only
        logits = rows.logits[row].copy()
        self._adjust(logits, sequence, tokens, mask)
        one = SampledRows([sequence], [1], rows.position[row : row + 1], logits[None])
        return int(self._choose(one, one.logits)[0][0])

    def _choose(self, rows: SampledRows, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        params = tuple(s.request.params.sampling for s in rows.sequences)
        feeds = {
            "logits": logits,
            "position": rows.position,
            **sampling_feeds(params, tuple(rows.count)),
        }
        outputs = self._executor.run("choose", feeds)
        return outputs["choice"], outputs["logprob"]

    def _adjust(
        self,
        logits: np.ndarray,
        sequence: SequenceState,
        tokens: np.ndarray,
        mask: TokenMask | None = None,
    ) -> None:
        prompt, output = np.split(tokens, [len(sequence.request.prompt_ids)])
        adjust(
            logits,
            sequence.request.params,
            prompt=prompt,
            output=output,
            eos_token_ids=self._eos_token_ids,
            mask=mask,
        )


def _tokens_before(rows: SampledRows) -> dict[int, tuple[SequenceState, np.ndarray]]:
    """Return, for each row with a logit processor, the tokens up to and including its own."""
    before: dict[int, tuple[SequenceState, np.ndarray]] = {}
    first = 0
    for b, sequence in enumerate(rows.sequences):
        if sequence.request.params.adjusts_logits:
            chain = rows.committed_rows(b)
            for i in range(rows.count[b]):
                drafts = [] if rows.trees is None or i < chain else rows.trees.path(b, i - chain)
                committed = int(rows.position[first + i]) + 1 - len(drafts)
                tokens = np.concatenate([sequence.ids[:committed], np.array(drafts, np.int32)])
                before[first + i] = (sequence, tokens)
        first += rows.count[b]
    return before


class _GuidedRows:
    """Replaces samples of one sequence with a guide by those of masked decoding."""

    def __init__(
        self,
        sampler: RowSampler,
        rows: SampledRows,
        b: int,
        choice: np.ndarray,
        logprob: np.ndarray,
    ) -> None:
        self._sampler = sampler
        self._rows = rows
        self._b = b
        self._sequence = rows.sequences[b]
        self._first = sum(rows.count[:b])
        self._choice = choice
        self._logprob = logprob
        self._masked = 0

    def mask_rows(self) -> int:
        """Mask the rows where needed; return how many samples along the path changed."""
        sequence, committed = self._sequence, self._rows.committed_rows(self._b)
        trees, prompt = self._rows.trees, len(sequence.request.prompt_ids)
        for row in range(self._first, self._first + committed):
            position = int(self._rows.position[row])
            if position + 1 >= prompt:
                self._mask_row(row, sequence.ids[: position + 1])
        if trees is None:
            return self._masked
        self._masked = 0
        slot: int | None = 0
        tokens = sequence.ids[: sequence.num_tokens]
        while slot is not None and self._mask_row(self._first + committed + slot, tokens):
            token = self._choice[self._first + committed + slot]
            slot = trees.child(self._b, slot, int(token))
            tokens = np.append(tokens, token)
        return self._masked

    def _mask_row(self, row: int, tokens: np.ndarray) -> bool:
        """Mask one row if needed; return False if the guide has no mask after ``tokens``."""
        sequence, guide = self._sequence, self._sequence.guide
        assert guide is not None
        output, before = tokens[len(sequence.request.prompt_ids) :], int(self._choice[row])
        if not sequence.request.params.sampling.cuts and guide.allows(output, before):
            return True
        mask = guide.mask(output)
        if mask is None:
            return False
        token = self._sampler.sample_masked(self._rows, row, sequence, tokens, mask)
        if token != before:
            self._masked += 1
            logits = self._rows.logits[row]
            self._logprob[row] += logits[token] - logits[before]
            self._choice[row] = token
        return True
