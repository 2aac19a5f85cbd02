"""The decoding loop: schedule, draft, verify, accept, commit, emit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

import numpy as np

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.row_placement import RowPlan, SlotCounter, cache_feeds, groups_of
from specbuild.runtime.decode.emission import Emission, TextStreams
from specbuild.runtime.decode.scheduler import Chunk, Scheduler
from specbuild.runtime.draft.costs import Outlook
from specbuild.runtime.draft.eagle3 import Drafter
from specbuild.runtime.draft.policy import DraftPolicy, StepOutcome
from specbuild.runtime.draft.tree import DraftTrees, chain_trees, shallower
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.executors.executor import Executor
from specbuild.runtime.lossy.dsa.host import Selections
from specbuild.runtime.lossy.specpv.host_tables import PartialViews
from specbuild.runtime.lossy.specpv.state import StepChoice
from specbuild.runtime.lossy.verified import Accepted, Verified
from specbuild.runtime.request import Event, Request, SequenceState
from specbuild.runtime.sampling import sampling_feeds


class Generation:
    """One call of ``Engine.generate``."""

    def __init__(
        self,
        *,
        executor: Executor,
        manifest: Manifest,
        kv: KvPools,
        counter: SlotCounter,
        requests: Sequence[Request],
        drafter: Drafter | None,
        policy: DraftPolicy,
        text_stream: TextStreams,
    ) -> None:
        self._executor = executor
        self._manifest = manifest
        self._counter = counter
        self._drafter = drafter
        self._policy = policy
        self._views = None if manifest.specpv is None else PartialViews(manifest, counter)
        self._selections = None if manifest.dsa is None else Selections(manifest)
        self._groups = groups_of(manifest.roles["target"])
        caches = drafter is not None and drafter.capabilities.uses_draft_caches
        self._draft_groups = groups_of(manifest.roles["draft"]) if caches else ()
        self._emission = Emission(
            manifest.target.eos_token_ids,
            max_depth=policy.max_depth,
            text_stream=text_stream,
            finished=self._finished,
        )
        self._scheduler = Scheduler(
            requests,
            manifest.limits,
            kv,
            self._emission.admit,
            invariant_rows=executor.capabilities.invariant_rows,
        )

    def events(self) -> Iterator[Event]:
        """Runs until every request is done."""
        after_prefill = False
        try:
            while not self._scheduler.finished:
                batch = self._scheduler.schedule()
                if batch.chunks:
                    yield from self._prefill(batch.chunks)
                    after_prefill = True
                    continue
                started_s = perf_counter()
                outlook = self._outlook(batch.sequences)
                trees = self._draft(batch.sequences, outlook)
                checked = self._selections is not None and self._selections.begin(batch.sequences)
                if checked:
                    self._sample(batch.sequences, trees)
                verified = self._verify(batch.sequences, trees)
                paths = self._accept(trees, verified)
                if self._selections is not None:
                    self._selections.judge(batch.sequences, verified, paths)
                self._commit(batch.sequences, trees, verified, paths)
                # A check takes two passes, which says nothing of what a step costs.
                untypical = after_prefill or checked
                step_s = None if untypical else perf_counter() - started_s
                self._policy.observe(_outcome(outlook, trees, paths.accepted, step_s))
                after_prefill = False
                yield from self._emit(batch.sequences, verified, paths)
        finally:
            for sequence in self._scheduler.close():
                self._forget(sequence)

    def _finished(self, sequence: SequenceState) -> None:
        self._scheduler.retire(sequence)
        self._forget(sequence)

    def _forget(self, sequence: SequenceState) -> None:
        """Nobody wants more of a sequence: a drafter may serve another generation after this."""
        if self._drafter is not None:
            self._drafter.release(sequence)
        if self._views is not None:
            self._views.release(sequence)
        if self._selections is not None:
            self._selections.release(sequence)

    def _prefill(self, chunks: Sequence[Chunk]) -> list[Event]:
        sequences = [chunk.sequence for chunk in chunks]
        first, count = [c.start for c in chunks], [c.count for c in chunks]
        plan = RowPlan(first, count, [f + n for f, n in zip(first, count, strict=True)])
        ending = [i for i, chunk in enumerate(chunks) if chunk.is_last]
        row_start = plan.row_start()
        # A launch wants one row of logits at least; nobody looks at it if no prompt ends here.
        rows = [int(row_start[i + 1]) - 1 for i in ending] or [0]
        ids = [s.ids[f : f + n] for s, f, n in zip(sequences, first, count, strict=True)]
        outputs = self._target(
            sequences,
            plan,
            prompts=True,
            token_ids=np.concatenate(ids),
            positions=self._counter.ranges(first, count),
            ancestor_bits=np.zeros((plan.rows, 1), np.int32),
            logit_rows=np.array(rows, np.int32),
        )
        for chunk in chunks:
            self._advance(chunk.sequence, chunk.count)
            if self._views is not None:
                self._views.prefilled(chunk.sequence)
        if ending:
            done = [sequences[i] for i in ending]
            position = np.array([s.length - 1 for s in done], np.int32)
            choice, logprob = self._choose(done, [1] * len(done), position, outputs["logits"])
            for sequence in done:
                sequence.tally.first_token()
            tokens = [[(int(t), float(p))] for t, p in zip(choice, logprob, strict=True)]
        captured = outputs.get("captured")
        fresh = dict(zip(ending, tokens, strict=True)) if ending else {}
        events: list[Event] = []
        for i, chunk in enumerate(chunks):
            events += self._emission.take(chunk.sequence, fresh.get(i, []), accepted=0)
            self._observe(chunk.sequence, captured, slice(int(row_start[i]), int(row_start[i + 1])))
        return events

    def _draft(self, sequences: Sequence[SequenceState], outlook: Outlook) -> DraftTrees:
        shape = self._policy.shape(outlook)
        deepest = [min(s.wanted - 1, self._policy.max_depth) for s in sequences]
        if shape is None or self._drafter is None or max(deepest) < 1:
            return chain_trees([s.root for s in sequences])
        trees = self._drafter.propose(sequences, shallower(shape, max(deepest)))
        # No slot is verified whose token could not be emitted any more.
        return trees.cut(deepest) if min(deepest) < self._policy.max_depth else trees

    def _outlook(self, sequences: Sequence[SequenceState]) -> Outlook:
        behind = [s.length - s.pages[g].length for g in self._draft_groups for s in sequences]
        return Outlook(
            batch=len(sequences),
            tokens_left=max(s.wanted for s in sequences),
            rows_behind=sum(behind),
        )

    def _sample(self, sequences: Sequence[SequenceState], trees: DraftTrees) -> None:
        """A pass that does not count: what narrowed attention chooses where it is checked."""
        assert self._selections is not None
        narrowed = self._verify(sequences, trees, counts=False)
        self._selections.sample(sequences, narrowed, self._accept(trees, narrowed))

    def _verify(
        self, sequences: Sequence[SequenceState], trees: DraftTrees, *, counts: bool = True
    ) -> Verified:
        """One target pass over every tree; slot i of sequence b is cache slot L + i."""
        if self._views is not None:
            return self._verify_over_views(self._views, sequences, trees, counts=counts)
        count: list[int] = trees.count.tolist()
        length = [s.length for s in sequences]
        plan = RowPlan(length, count, length)
        shape, root_row = trees.tokens.shape, plan.row_start()
        # Which slots are rows; where all are, reshaping does without copies.
        used = None if trees.full else np.arange(shape[1]) < trees.count[:, None]

        def rows_of(slots: np.ndarray) -> np.ndarray:
            return slots.reshape(-1, *slots.shape[2:]) if used is None else slots[used]

        positions = rows_of(trees.depths + np.array(length, np.int32)[:, None])
        outputs = self._target(
            sequences,
            plan,
            token_ids=rows_of(trees.tokens),
            positions=positions,
            ancestor_bits=rows_of(trees.ancestor_bits),
            logit_rows=self._counter.range(0, plan.rows),
        )
        row_choice, row_logprob = self._choose(sequences, count, positions, outputs["logits"])
        captured = outputs.get("captured")
        if used is None:
            choice, logprob = row_choice.reshape(shape), row_logprob.reshape(shape)
            return Verified(choice, logprob, captured, root_row, None)
        choice, logprob = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
        choice[used], logprob[used] = row_choice, row_logprob
        return Verified(choice, logprob, captured, root_row, None)

    def _verify_over_views(
        self,
        views: PartialViews,
        sequences: Sequence[SequenceState],
        trees: DraftTrees,
        *,
        counts: bool,
    ) -> Verified:
        """The same where a sequence may show a part of its context, or be fed tokens again.

        Those stand as a chain in front of the tree; what is chosen behind them says how often
        the partial steps that emitted them were right.
        """
        choices = views.choose(sequences, (trees.count - 1).tolist())
        length = [s.length for s in sequences]
        chain = [n - c.chain_start for n, c in zip(length, choices, strict=True)]
        tree: list[int] = trees.count.tolist()
        plan = RowPlan(
            [c.chain_start for c in choices],
            [c + t for c, t in zip(chain, tree, strict=True)],
            length,
        )
        row_start = plan.row_start()
        root_row = row_start[:-1] + np.array(chain, np.int32)
        in_tree = np.ones(plan.rows, bool)
        for first, root in zip(row_start, root_row, strict=False):
            in_tree[first:root] = False
        used = np.arange(trees.tokens.shape[1]) < trees.count[:, None]
        token_ids, positions = np.zeros((2, plan.rows), np.int32)
        bits = np.zeros((plan.rows, trees.ancestor_bits.shape[2]), np.int32)
        token_ids[in_tree], bits[in_tree] = trees.tokens[used], trees.ancestor_bits[used]
        positions[in_tree] = (trees.depths + np.array(length, np.int32)[:, None])[used]
        for s, c, first, n in zip(sequences, choices, row_start, chain, strict=False):
            fed_again = slice(c.chain_start, c.chain_start + n)
            token_ids[first : first + n] = s.ids[fed_again]
            positions[first : first + n] = np.arange(fed_again.start, fed_again.stop)
        outputs = self._target(
            sequences,
            plan,
            choices,
            token_ids=token_ids,
            positions=positions,
            ancestor_bits=bits,
            logit_rows=self._counter.range(0, plan.rows),
        )
        row_choice, row_logprob = self._choose(sequences, plan.count, positions, outputs["logits"])
        if counts:
            views.take(sequences, choices, outputs)
            views.recheck(sequences, choices, row_choice, row_start)
        shape = trees.tokens.shape
        choice, logprob = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
        choice[used], logprob[used] = row_choice[in_tree], row_logprob[in_tree]
        return Verified(choice, logprob, outputs.get("captured"), root_row, choices)

    def _accept(self, trees: DraftTrees, verified: Verified) -> Accepted:
        """The longest path of each tree that the target's choices confirm."""
        if trees.nodes == 0:
            return Accepted(np.zeros((len(trees.count), 1), np.int32), [0] * len(trees.count))
        outputs = self._executor.run(
            "accept",
            {
                "tokens": trees.tokens,
                "parents": trees.parents,
                "ancestor_bits": trees.ancestor_bits,
                "count": trees.count,
                "choice": verified.choice,
            },
        )
        return Accepted(outputs["path"], outputs["accepted"].tolist())

    def _commit(
        self,
        sequences: Sequence[SequenceState],
        trees: DraftTrees,
        verified: Verified,
        paths: Accepted,
    ) -> None:
        """The path's cache entries move to the committed slots; the other nodes are forgotten."""
        if not trees.contiguous:
            self._move(sequences, paths.path)
        for b, (sequence, accepted) in enumerate(zip(sequences, paths.accepted, strict=True)):
            view = None if verified.views is None else verified.views[b]
            self._advance(sequence, accepted + 1, view)

    def _move(self, sequences: Sequence[SequenceState], path: np.ndarray) -> None:
        places = np.arange(path.shape[1])
        moved = (path >= 0) & (path != places)
        if not moved.any():
            return
        feeds = {}
        for group in self._groups:
            source = np.full(path.shape, -1, np.int32)
            target = np.full(path.shape, -1, np.int32)
            for b, sequence in enumerate(sequences):
                slots = sequence.pages[group].slots
                source[b, moved[b]] = slots[sequence.length + path[b, moved[b]]]
                target[b, moved[b]] = slots[sequence.length + places[moved[b]]]
            feeds[f"{group}.from_slot"], feeds[f"{group}.to_slot"] = source, target
        self._executor.run("commit", feeds)

    def _emit(
        self, sequences: Sequence[SequenceState], verified: Verified, paths: Accepted
    ) -> list[Event]:
        """The target's choices along the path are the new tokens; all but the last were drafts."""
        events: list[Event] = []
        for b, sequence in enumerate(sequences):
            accepted = paths.accepted[b]
            slots = paths.path[b, : accepted + 1]
            choices = verified.choice[b, slots].tolist()
            logprobs = verified.logprob[b, slots].tolist()
            tokens = list(zip(choices, logprobs, strict=True))
            events += self._emission.take(sequence, tokens, accepted=accepted)
            self._observe(sequence, verified.captured, verified.root_row[b] + slots)
        return events

    def _target(
        self,
        sequences: Sequence[SequenceState],
        plan: RowPlan,
        views: Sequence[StepChoice] | None = None,
        *,
        prompts: bool = False,
        **feeds: np.ndarray,
    ) -> dict[str, np.ndarray]:
        feeds["row_start"] = plan.row_start()
        for group in self._groups:
            holders = [s.pages[group] for s in sequences]
            for holder, first, count in zip(holders, plan.first, plan.count, strict=True):
                holder.append(first + count - holder.length)
            if self._views is not None and group in self._views.groups:
                feeds |= self._views.feeds(group, sequences, plan, views)
            else:
                feeds |= cache_feeds(group, holders, plan, self._counter)
        if self._selections is None:
            return self._executor.run("target", feeds)
        feeds |= self._selections.feeds(sequences, prompts=prompts)
        outputs = self._executor.run("target", feeds)
        self._selections.note(sequences, outputs)
        return outputs

    def _choose(
        self,
        sequences: Sequence[SequenceState],
        count: Sequence[int],
        position: np.ndarray,
        logits: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The target's token at each row and its log-probability, both [R]."""
        params = tuple(s.request.params.sampling for s in sequences)
        feeds = {
            "logits": logits,
            "position": position,
            **sampling_feeds(params, tuple(count)),
        }
        outputs = self._executor.run("choose", feeds)
        return outputs["choice"], outputs["logprob"]

    def _advance(self, sequence: SequenceState, count: int, view: StepChoice | None = None) -> None:
        """``count`` more tokens stand in the target's cache."""
        before, fed_again = sequence.length, None
        sequence.length += count
        if self._views is not None and view is not None:
            fed_again = self._views.committed(sequence, view, before)
        for group in self._groups:
            sequence.pages[group].commit(sequence.length, fed_again=fed_again)

    def _observe(
        self, sequence: SequenceState, captured: np.ndarray | None, rows: slice | np.ndarray
    ) -> None:
        """Tells the drafter of the tokens just committed."""
        if self._drafter is None or sequence.finish_reason is not None:
            return
        wanted = self._drafter.capabilities.reads_captured
        self._drafter.observe(sequence, captured[rows] if wanted and captured is not None else None)


def _outcome(
    outlook: Outlook, trees: DraftTrees, accepted: list[int], step_s: float | None
) -> StepOutcome:
    """What became of a step whose trees are chains, as every policy that learns asks for."""
    depth = trees.nodes
    shape = DraftShape(1, depth, depth) if depth else None
    return StepOutcome(outlook, shape, (trees.count - 1).tolist(), accepted, step_s)
