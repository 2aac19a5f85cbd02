"""The target's passes on the host: which rows a launch has, and where they stand in the caches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbuild.runtime.cache.row_placement import RowPlan, SlotCounter, cache_feeds, groups_of
from specbuild.runtime.draft.tree import DraftTrees
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.executors.executor import Executor
from specbuild.runtime.lossy.dsa.host import Selections
from specbuild.runtime.lossy.specpv.host_tables import PartialViews
from specbuild.runtime.lossy.specpv.state import StepChoice
from specbuild.runtime.lossy.verified import Verified
from specbuild.runtime.request import SequenceState
from specbuild.runtime.sampling import sampling_feeds


class TargetPasses:
    """Runs the roles ``target`` and ``choose``; holds the lossy modes that change their inputs."""

    def __init__(self, executor: Executor, manifest: Manifest, counter: SlotCounter) -> None:
        self._executor = executor
        self._counter = counter
        self.views = None if manifest.specpv is None else PartialViews(manifest, counter)
        self.selections = None if manifest.dsa is None else Selections(manifest)
        self.groups = groups_of(manifest.roles["target"])

    def release(self, sequence: SequenceState) -> None:
        """The sequence is done."""
        if self.views is not None:
            self.views.release(sequence)
        if self.selections is not None:
            self.selections.release(sequence)

    def verify(
        self, sequences: Sequence[SequenceState], trees: DraftTrees, *, counts: bool = True
    ) -> Verified:
        """One target pass over every tree; slot i of sequence b is cache slot L + i."""
        if self.views is not None:
            return self._verify_over_views(self.views, sequences, trees, counts=counts)
        count: list[int] = trees.count.tolist()
        length = [s.length for s in sequences]
        plan = RowPlan(length, count, length)
        shape, root_row = trees.tokens.shape, plan.row_start()
        # Which slots are rows; where all are, reshaping does without copies.
        used = None if trees.full else np.arange(shape[1]) < trees.count[:, None]

        def rows_of(slots: np.ndarray) -> np.ndarray:
            return slots.reshape(-1, *slots.shape[2:]) if used is None else slots[used]

        positions = rows_of(trees.depths + np.array(length, np.int32)[:, None])
        outputs = self.launch(
            sequences,
            plan,
            token_ids=rows_of(trees.tokens),
            positions=positions,
            ancestor_bits=rows_of(trees.ancestor_bits),
            logit_rows=self._counter.range(0, plan.rows),
        )
        row_sampled, row_logprob = self.sample(sequences, count, positions, outputs["logits"])
        aux_hidden = outputs.get("captured")
        if used is None:
            sampled, logprob = row_sampled.reshape(shape), row_logprob.reshape(shape)
            return Verified(sampled, logprob, aux_hidden, root_row, None)
        sampled, logprob = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
        sampled[used], logprob[used] = row_sampled, row_logprob
        return Verified(sampled, logprob, aux_hidden, root_row, None)

    def _verify_over_views(
        self,
        views: PartialViews,
        sequences: Sequence[SequenceState],
        trees: DraftTrees,
        *,
        counts: bool,
    ) -> Verified:
        """The same where a sequence may show a part of its context, or have tokens re-verified.

        Those stand as a chain in front of the tree; what is sampled behind them shows how often
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
            reverified = slice(c.chain_start, c.chain_start + n)
            token_ids[first : first + n] = s.ids[reverified]
            positions[first : first + n] = np.arange(reverified.start, reverified.stop)
        outputs = self.launch(
            sequences,
            plan,
            choices,
            token_ids=token_ids,
            positions=positions,
            ancestor_bits=bits,
            logit_rows=self._counter.range(0, plan.rows),
        )
        row_sampled, row_logprob = self.sample(sequences, plan.count, positions, outputs["logits"])
        if counts:
            views.take(sequences, choices, outputs)
            views.recheck(sequences, choices, row_sampled, row_start)
        shape = trees.tokens.shape
        sampled, logprob = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
        sampled[used], logprob[used] = row_sampled[in_tree], row_logprob[in_tree]
        return Verified(sampled, logprob, outputs.get("captured"), root_row, choices)

    def launch(
        self,
        sequences: Sequence[SequenceState],
        plan: RowPlan,
        views: Sequence[StepChoice] | None = None,
        *,
        prompts: bool = False,
        **feeds: np.ndarray,
    ) -> dict[str, np.ndarray]:
        feeds["row_start"] = plan.row_start()
        for group in self.groups:
            holders = [s.pages[group] for s in sequences]
            for holder, first, count in zip(holders, plan.first, plan.count, strict=True):
                holder.append(first + count - holder.length)
            if self.views is not None and group in self.views.groups:
                feeds |= self.views.feeds(group, sequences, plan, views)
            else:
                feeds |= cache_feeds(group, holders, plan, self._counter)
        if self.selections is None:
            return self._executor.run("target", feeds)
        feeds |= self.selections.feeds(sequences, prompts=prompts)
        outputs = self._executor.run("target", feeds)
        self.selections.note(sequences, outputs)
        return outputs

    def sample(
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
