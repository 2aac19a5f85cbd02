"""The target's logits after every token of a sequence, computed by the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.row_placement import RowLayout, SlotCounter
from specbuild.runtime.decode.host.target_passes import TargetPasses
from specbuild.runtime.decode.scoring import ScoredRows, scored_sequence
from specbuild.runtime.draft.tree import chain_trees
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.executors.executor import Executor
from specbuild.runtime.request import SequenceState

# The largest size of the logits of one pass; a large vocabulary allows fewer rows.
_LOGITS_BYTES = 1 << 26


def score_on_host(
    ids: Sequence[int],
    executor: Executor,
    manifest: Manifest,
    kv: KvPools,
    counter: SlotCounter,
    *,
    prompt_tokens: int,
) -> Iterator[ScoredRows]:
    """Score the first ``prompt_tokens`` tokens (at least 1) by prefill; yield rows in order.

    The other tokens are scored one by one, as steps without a draft compute them, including lossy
    modes.
    """
    passes = TargetPasses(executor, manifest, counter)
    max_rows = max(1, min(manifest.limits.max_rows, _LOGITS_BYTES // (4 * manifest.target.vocab)))
    with scored_sequence(ids, kv) as sequence:
        passes.admit(sequence)
        try:
            for start in range(0, prompt_tokens, max_rows):
                yield _prefill(
                    passes, sequence, start, min(max_rows, prompt_tokens - start), counter
                )
            for position in range(prompt_tokens, len(ids)):
                yield _step(passes, sequence, position)
        finally:
            passes.release(sequence)


def _prefill(
    passes: TargetPasses, sequence: SequenceState, start: int, count: int, counter: SlotCounter
) -> ScoredRows:
    layout = RowLayout([start], [count], [start + count])
    outputs = passes.prompts([sequence], layout, counter.range(0, count).tolist())
    passes.advance(sequence, count)
    return _rows(start, outputs, slice(None))


def _step(passes: TargetPasses, sequence: SequenceState, position: int) -> ScoredRows:
    sequence.num_tokens = position + 1
    verified = passes.verify([sequence], chain_trees([sequence.root]))
    passes.advance(sequence, 1)
    row = int(verified.root_row[0])
    return _rows(position, verified.outputs, slice(row, row + 1))


def _rows(first: int, outputs: Mapping[str, np.ndarray], rows: slice) -> ScoredRows:
    """Copy these rows. Outputs are valid only until the graph runs again."""
    aux_hidden = outputs.get("captured")
    return ScoredRows(
        first,
        outputs["logits"][rows].copy(),
        None if aux_hidden is None else aux_hidden[rows].copy(),
    )
