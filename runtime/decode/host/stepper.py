"""A stepper that computes launches on the host. Each completes when its start returns."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from specbuild.runtime.cache.row_placement import RowLayout, SlotCounter
from specbuild.runtime.cache.state_snapshots import StateSnapshots
from specbuild.runtime.decode.host.guided_drafts import forced_chains, with_forced_tokens
from specbuild.runtime.decode.host.row_samples import SampledRows
from specbuild.runtime.decode.host.target_passes import TargetPasses
from specbuild.runtime.decode.logit_rows import most_likely
from specbuild.runtime.decode.scheduler import Chunk
from specbuild.runtime.decode.stepper import LaunchResult, NewTokens
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.draft_models import ModelShape
from specbuild.runtime.draft.drafter import CachingDrafter, Drafter
from specbuild.runtime.draft.host_proposal import HostProposal, HostProposer, ProposedDepths
from specbuild.runtime.draft.policy import ChosenDraft, SequenceDepths, StepOutcome
from specbuild.runtime.draft.static_tree import StaticTree
from specbuild.runtime.draft.tree import DraftTrees, chain_trees, shallower
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.executors.executor import Executor
from specbuild.runtime.lossy.mode import Verified
from specbuild.runtime.request import SequenceState, TopLogprobs
from specbuild.runtime.statistics import StepClock

# Rows of aux hidden states that a launch committed, by sequence, for the drafter.
Committed = list[tuple[SequenceState, np.ndarray | slice]]


class HostStepper:
    """Runs an engine's graphs by role. ``drafter`` None decodes without a draft model.

    ``proposer`` proposes tokens before each step, which the policy may use instead. ``max_depth``
    is the depth of the deepest draft, or chain of forced tokens, that a step may verify.
    ``snapshots`` are those of recurrent states that prompts resume from.
    """

    max_in_flight = 1

    def __init__(
        self,
        executor: Executor,
        manifest: Manifest,
        counter: SlotCounter,
        *,
        drafter: Drafter | None,
        max_depth: int,
        proposer: HostProposer | None = None,
        clock: StepClock | None = None,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self._executor = executor
        self._counter = counter
        self._drafter = drafter
        self._proposer = proposer
        self._clock = StepClock() if clock is None else clock
        self._proposal = HostProposal((), ())
        # Whether a replay after preemption produces the same tokens.
        self._is_batch_invariant = executor.capabilities.batch_invariant
        self._max_depth = max_depth
        self._target = TargetPasses(executor, manifest, counter, snapshots=snapshots)
        self._draft_groups = drafter.cache_groups if isinstance(drafter, CachingDrafter) else ()
        self._result: LaunchResult | None = None
        self._committed: Committed = []
        self._aux_hidden: np.ndarray | None = None
        self._follows_prefill = False

    @property
    def in_flight(self) -> int:
        """Number of launches computed and not received: 0 or 1."""
        return 0 if self._result is None else 1

    def open(self) -> None:
        """Nothing to do: no state outlives a loop."""

    def admit(self, sequence: SequenceState) -> None:
        """Add a sequence to the lossy modes."""
        self._target.admit(sequence)

    def release(self, sequence: SequenceState) -> None:
        """Remove a sequence. Its drafter may serve another loop afterwards."""
        for drafter in (self._drafter, self._proposer):
            if drafter is not None:
                drafter.release(sequence)
        self._target.release(sequence)

    def grow(self, sequence: SequenceState) -> None:
        """Nothing to do: each launch reads the current pages."""

    def pause(self, sequence: SequenceState) -> None:
        """Nothing to do: the caller passes the sequences of each launch."""

    def resume(self, sequence: SequenceState) -> None:
        """See :meth:`pause`."""

    def close(self, sequences: Sequence[SequenceState]) -> None:
        """Release each sequence."""
        for sequence in sequences:
            self.release(sequence)

    def step_context(self, sequences: Sequence[SequenceState]) -> StepContext:
        """Count the tokens that the draft has to ingest first, and request a host proposal."""
        uncached_rows = [
            sum(s.length - s.pages[group].length for s in sequences) for group in self._draft_groups
        ]
        if self._proposer is not None:
            max_tokens = [self._max_drafts(s) for s in sequences]
            started_s = perf_counter()
            self._proposal = self._proposer.propose_chains(sequences, max_tokens)
            self._clock.draft_s += perf_counter() - started_s
        return StepContext(
            batch=len(sequences),
            tokens_left=max(s.tokens_left for s in sequences),
            pending_rows=uncached_rows[0] if uncached_rows else 0,
            other_pending_rows=tuple(uncached_rows[1:]),
            num_sampled=sum(s.request.params.sampling.temperature > 0 for s in sequences),
            cumulative_probs=self._proposal.cumulative_probs,
        )

    def start_prompts(self, chunks: Sequence[Chunk]) -> None:
        """Run one pass of the target over prompt rows."""
        sequences = [chunk.sequence for chunk in chunks]
        first, count = [c.start for c in chunks], [c.count for c in chunks]
        layout = RowLayout(first, count, [f + n for f, n in zip(first, count, strict=True)])
        ending = [i for i, chunk in enumerate(chunks) if chunk.is_last]
        row_start = layout.row_start()
        # A launch needs at least one row of logits. It is unused if no prompt ends here.
        rows = [int(row_start[i + 1]) - 1 for i in ending] or [0]
        outputs = self._target.prompts(sequences, layout, rows)
        for chunk in chunks:
            self._target.advance(chunk.sequence, chunk.count)
        emitted = []
        if ending:
            done = [sequences[i] for i in ending]
            position = np.array([s.length - 1 for s in done], np.int32)
            ends = SampledRows(done, [1] * len(done), position, outputs["logits"])
            sampled, logprob = self._target.sampler.sample(ends)
            for row, (sequence, choice) in enumerate(zip(done, sampled.tolist(), strict=True)):
                is_replayed = sequence.replay_remaining and not self._is_batch_invariant
                token = int(sequence.ids[sequence.num_tokens]) if is_replayed else choice
                tokens = [(token, float(logprob[row]))]
                top = _top_logprobs(sequence, outputs["logits"], [row], tokens)
                emitted.append(NewTokens(sequence, tokens, top_logprobs=top))
        self._result = LaunchResult(emitted, prompt_tokens=sum(count))
        self._aux_hidden, self._follows_prefill = outputs.get("captured"), True
        self._committed = [
            (sequence, slice(int(row_start[i]), int(row_start[i + 1])))
            for i, sequence in enumerate(sequences)
        ]

    def prepare_step(self, sequences: Sequence[SequenceState], shape: ChosenDraft) -> None:
        """Nothing to do: a prefill launch completes when its start returns."""

    def start(
        self, sequences: Sequence[SequenceState], shape: ChosenDraft, step_context: StepContext
    ) -> None:
        """Compute a full step."""
        started_s = perf_counter()
        forced = self._forced_trees(sequences, shape)
        trees = self._draft(sequences, shape) if forced is None else forced
        drafted_s = perf_counter()
        verified = self._target.verify(sequences, trees)
        if not self._is_batch_invariant and any(
            sequence.replay_remaining for sequence in sequences
        ):
            verified = replace_replayed(sequences, verified)
        self._target.commit(sequences, trees, verified)
        for sequence, accepted in zip(sequences, verified.accepted, strict=True):
            self._target.advance(sequence, accepted + 1)
        ended_s = perf_counter()
        self._clock.steps += 1
        self._clock.draft_s += drafted_s - started_s
        self._clock.verify_s += ended_s - drafted_s
        # A DSA check takes two passes, and the first step after prefill is slower. Neither is
        # timed.
        is_untypical = self._follows_prefill or verified.checked
        step_s = None if is_untypical else ended_s - started_s
        self._follows_prefill = False
        # The acceptance of forced tokens is no measure of the draft.
        outcome = None
        if forced is None:
            sampled = [s.request.params.sampling.temperature > 0 for s in sequences]
            outcome = StepOutcome(
                step_context,
                _verified_shape(shape, trees.nodes),
                (trees.count - 1).tolist(),
                verified.accepted,
                step_s,
                sampled,
            )
            if self._proposer is not None and isinstance(shape, ProposedDepths):
                self._proposer.record_result(sequences, shape.depths, verified.accepted)
        self._result = LaunchResult(self._new_tokens(sequences, verified, trees), outcome)

    def receive(self) -> LaunchResult:
        """Return the result of the launch."""
        done, self._result = self._result, None
        assert done is not None, "nothing was started"
        return done

    def after_emit(self) -> None:
        """Pass the tokens just committed, and their aux hidden states, to the drafter."""
        drafter, aux_hidden = self._drafter, self._aux_hidden
        started_s = perf_counter()
        if drafter is not None:
            if not drafter.capabilities.reads_aux_hidden:
                aux_hidden = None
            for sequence, rows in self._committed:
                # A finished sequence leaves its draft's pages to the prefix cache.
                if sequence.finish_reason is None or sequence.prefix is not None:
                    drafter.observe(sequence, None if aux_hidden is None else aux_hidden[rows])
            self._clock.draft_s += perf_counter() - started_s
        self._committed, self._aux_hidden = [], None

    def _forced_trees(
        self, sequences: Sequence[SequenceState], shape: ChosenDraft
    ) -> DraftTrees | None:
        """Return the chains of forced tokens if they replace the draft of this shape, or None.

        They replace a draft if they are at least as long.
        """
        max_depths = [self._max_drafts(s) for s in sequences]
        assert not isinstance(shape, SequenceDepths), "only device executors have ragged steps"
        min_tokens = 0 if shape is None else min(shape.draft_depth, max(max_depths))
        return forced_chains(sequences, min_tokens=min_tokens, max_tokens=max_depths)

    def _draft(self, sequences: Sequence[SequenceState], shape: ChosenDraft) -> DraftTrees:
        if isinstance(shape, ProposedDepths):
            trees = self._proposal.trees([s.root for s in sequences], shape.depths)
            return with_forced_tokens(sequences, trees)
        assert not isinstance(shape, SequenceDepths), "only device executors have ragged steps"
        max_depths = [self._max_drafts(s) for s in sequences]
        if shape is None or self._drafter is None or max(max_depths) < 1:
            return chain_trees([s.root for s in sequences])
        if isinstance(shape, StaticTree):
            shape = shape.shallower(max(max_depths))
        trees = self._drafter.propose(sequences, shallower(shape, max(max_depths)))
        trees = with_forced_tokens(sequences, trees)
        # Do not verify drafts whose tokens would exceed the token budget.
        return trees.cut(max_depths) if min(max_depths) < self._max_depth else trees

    def _max_drafts(self, sequence: SequenceState) -> int:
        """The depth of the deepest draft that a step may verify for a sequence."""
        if sequence.guide is not None and sequence.guide.is_remote:
            return 0
        return min(sequence.tokens_left - 1, self._max_depth)

    def _new_tokens(
        self, sequences: Sequence[SequenceState], verified: Verified, trees: DraftTrees
    ) -> list[NewTokens]:
        """Return the target's samples along each accepted path; all but the last were drafts."""
        emitted = []
        self._aux_hidden = verified.outputs.get("captured")
        for b, sequence in enumerate(sequences):
            accepted = verified.accepted[b]
            slots = verified.path[b, : accepted + 1]
            choices = verified.sampled[b, slots].tolist()
            logprobs = verified.logprob[b, slots].tolist()
            tokens = list(zip(choices, logprobs, strict=True))
            rows = verified.root_row[b] + slots
            top = _top_logprobs(sequence, verified.outputs["logits"], rows.tolist(), tokens)
            proposed = int(trees.count[b]) - 1
            new = NewTokens(
                sequence, tokens, accepted=accepted, top_logprobs=top, proposed=proposed
            )
            emitted.append(new)
            self._committed.append((sequence, rows))
        return emitted


def _top_logprobs(
    sequence: SequenceState,
    logits: np.ndarray,
    rows: Sequence[int],
    tokens: Sequence[tuple[int, float]],
) -> list[TopLogprobs]:
    """Return the most likely tokens at these rows of ``logits`` [R, V]."""
    count = sequence.request.params.top_logprobs
    if not count:
        return []
    return [
        most_likely(logits[row], count, token=token, logprob=logprob)
        for row, (token, logprob) in zip(rows, tokens, strict=True)
    ]


def _verified_shape(chosen: ChosenDraft, depth: int) -> ChosenDraft:
    """Return the shape of a step whose trees are chains of ``depth``, for a policy that learns."""
    if isinstance(chosen, ProposedDepths):
        return chosen
    if depth and isinstance(chosen, ModelShape):
        return ModelShape(1, depth, depth, chosen.drafter)
    return DraftShape(1, depth, depth) if depth else None


def replace_replayed(sequences: Sequence[SequenceState], verified: Verified) -> Verified:
    """Return the results of a step with replayed tokens replaced by the tokens emitted before.

    On an executor that is not batch-invariant, a near tie may be resolved differently when a
    preempted sequence is decoded again. Drafts after the replaced token are not accepted.
    """
    sampled, path, accepted = verified.sampled, verified.path, verified.accepted
    for b, sequence in enumerate(sequences):
        count = min(sequence.replay_remaining, accepted[b] + 1)
        slots = path[b, :count]
        emitted = sequence.ids[sequence.num_tokens : sequence.num_tokens + count]
        differing = (sampled[b, slots] != emitted).nonzero()[0]
        if len(differing):
            sampled, path, accepted = sampled.copy(), path.copy(), list(accepted)
            first = accepted[b] = int(differing[0])
            sampled[b, slots[first]] = emitted[first]
            path[b, first + 1 :] = -1
    return verified._replace(sampled=sampled, path=path, accepted=accepted)
