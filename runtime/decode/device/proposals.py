"""Chains that the host proposes for device steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from specbuild.runtime.decode.device.guide_checks import GuideChecks
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.host_proposal import HostProposal, HostProposer, ProposedDepths
from specbuild.runtime.draft.policy import ChosenDraft, SequenceDepths
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import FORCED, OFFERED, ProgramEntry
from specbuild.runtime.executors.executor import DeviceExecutor
from specbuild.runtime.lossy.mode import StepAhead
from specbuild.runtime.request import SequenceState


class DeviceProposals:
    """Requests, writes and records chains for one loop, those of ``drafter`` if there is one.

    A sequence whose guide is checked gets the tokens that the guide forces, which the step accepts
    whatever the target chooses. Other sequences with a guide get no chain.
    """

    def __init__(
        self, drafter: HostProposer | None, executor: DeviceExecutor, programs: ProgramTable
    ) -> None:
        self._drafter, self._executor, self._programs = drafter, executor, programs
        # Older engines cannot force rows.
        self._forces_rows = executor.port(FORCED) is not None
        self._sequences: Sequence[SequenceState] = ()
        self._proposal = HostProposal((), ())

    def propose(
        self,
        context: StepContext,
        sequences: Sequence[SequenceState],
        in_flight: Iterable[StepAhead],
        checks: GuideChecks,
    ) -> StepContext:
        """Return the context of a step with the acceptance chances of proposed tokens.

        Tokens of the drafter follow those that the steps ``in_flight`` may emit, forced tokens
        those that the host has read. Nothing is proposed if no step program has enough rows.
        """
        free = [b for b, sequence in enumerate(sequences) if sequence.guide is None]
        free = [] if self._drafter is None else free
        # A chain that a guide may refuse is not proposed. After a refusal the draft ingests tokens
        # from the refused one on, and its buffer must still hold them.
        tokens: list[Sequence[int]] = [()] * len(sequences)
        is_checked = [self._forces_rows and s in checks for s in sequences]
        if any(is_checked):
            tokens = [
                checks.forced(s) if c else () for s, c in zip(sequences, is_checked, strict=True)
            ]
        if not free and not any(tokens):
            return replace(context, proposals_wait=False)
        rows = context.rows or context.batch
        unread = max_unread_tokens(sequences, in_flight)
        context = replace(
            context,
            has_unread_tokens=any(unread[b] for b in free),
            proposals_wait=bool(free),
        )
        full_logits = context.full_logits or any(is_checked)
        longest, most = self._programs.host_chain_limits(batch=rows, full_logits=full_logits)
        if not longest:
            return context
        max_tokens = [
            min(s.tokens_left - 1, longest + n) for s, n in zip(sequences, unread, strict=True)
        ]
        probs: list[tuple[float, ...]] = [()] * len(sequences)
        if free and self._drafter is not None:
            proposal = self._drafter.propose_chains(
                [sequences[b] for b in free], [max_tokens[b] for b in free]
            )
            for b, chain, of_chain in zip(
                free, proposal.tokens, proposal.cumulative_probs, strict=True
            ):
                tokens[b], probs[b] = chain, of_chain
        for b, sequence in enumerate(sequences):
            if is_checked[b] and tokens[b]:
                max_forced = max(min(sequence.tokens_left - 1, longest), 0)
                tokens[b] = tokens[b][:max_forced]
                probs[b] = (1.0,) * len(tokens[b])
        self._sequences, self._proposal = sequences, HostProposal(tokens, tuple(probs))
        read = [
            c if is_forced else c[n:]
            for c, n, is_forced in zip(probs, unread, is_checked, strict=True)
        ]
        depths = likeliest_depths(read, most)
        probs_by_depth = tuple(c[:depth] for c, depth in zip(read, depths, strict=True))
        return replace(context, cumulative_probs=probs_by_depth)

    def write(
        self,
        entry: ProgramEntry,
        rows: Mapping[int, SequenceState],
        depths: Mapping[int, int],
    ) -> Mapping[int, Sequence[int]]:
        """Write the first ``depths[row]`` tokens of each chain for the next step; return them."""
        chain_of = {id(s): c for s, c in zip(self._sequences, self._proposal.tokens, strict=True)}
        chains = {row: chain_of[id(sequence)][: depths[row]] for row, sequence in rows.items()}
        self._executor.write(OFFERED, host_chain_values(entry, chains))
        return chains

    def record(self, results: Iterable[tuple[SequenceState, int, int]]) -> None:
        """Record, for each sequence, how many proposed tokens were verified and accepted."""
        free = [result for result in results if result[0].guide is None]
        if free and self._drafter is not None:
            sequences, depths, accepted = zip(*free, strict=True)
            self._drafter.record_result(sequences, depths, accepted)

    def release(self, sequence: SequenceState) -> None:
        """Remove a sequence that finished or whose loop was closed."""
        if self._drafter is not None:
            self._drafter.release(sequence)


def likeliest_depths(cumulative_probs: Sequence[Sequence[float]], tokens: int) -> list[int]:
    """Return how much of each chain belongs to the ``tokens`` likeliest tokens of all chains.

    ``cumulative_probs[b]`` never rise. Of equal tokens the earlier ones of a chain come first.
    """
    depths = [len(chain) for chain in cumulative_probs]
    if sum(depths) <= tokens:
        return depths
    nodes = [(-p, i, b) for b, chain in enumerate(cumulative_probs) for i, p in enumerate(chain)]
    kept = Counter(b for _, _, b in sorted(nodes)[:tokens])
    return [kept[b] for b in range(len(cumulative_probs))]


def max_unread_tokens(sequences: Sequence[SequenceState], steps: Iterable[StepAhead]) -> list[int]:
    """Return how many tokens of each sequence may be in flight, in ``steps`` or after prefill."""
    max_tokens: Counter[int] = Counter()
    for step in steps:
        max_tokens.update({id(s): 1 + step.depth_of(row) for row, s in step.rows.items()})
    # Nothing counts of the steps that started after a token that a guide refused.
    return [
        (max_tokens[id(s)] if s.valid_steps_in_flight else 0) if s.num_output_tokens else 1
        for s in sequences
    ]


def host_chain_values(entry: ProgramEntry, chains: Mapping[int, Sequence[int]]) -> np.ndarray:
    """Return the port ``offered`` of a program: the chain of each row, empty for other rows.

    int32: for each row 1 plus the length of its chain. Then ``draft_tokens`` + 1 entries for each
    row, of which the first is ignored.
    """
    counts = np.ones(entry.batch, np.int32)
    tokens = np.zeros((entry.batch, entry.draft_tokens + 1), np.int32)
    for row, chain in chains.items():
        if len(chain):
            counts[row] += len(chain)
            tokens[row, 1 : 1 + len(chain)] = chain
    return np.concatenate([counts, tokens.reshape(-1)])


def step_ahead(
    rows: Mapping[int, SequenceState],
    sequences: Sequence[SequenceState],
    chosen: ChosenDraft,
    max_unread: int,
) -> StepAhead:
    """Return the next step of ``sequences``, in the order of the choice."""
    if not isinstance(chosen, ProposedDepths | SequenceDepths):
        return StepAhead(rows, chosen, max_unread)
    by_index = {s.index: depth for s, depth in zip(sequences, chosen.depths, strict=True)}
    depths = {row: by_index[sequence.index] for row, sequence in rows.items()}
    if isinstance(chosen, SequenceDepths):
        return StepAhead(rows, chosen.shape, max_unread, row_depths=depths)
    max_depth = chosen.draft_depth
    return StepAhead(rows, DraftShape(1, max_depth, max_depth), max_unread, depths)
