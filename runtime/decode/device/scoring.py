"""The target's logits after every token of a sequence, computed by scoring programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.decode.device.pages import DevicePages
from specbuild.runtime.decode.device.prefill_rows import PromptRows, prefill_arrays
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.decode.device.rows import DeviceRows
from specbuild.runtime.decode.scoring import ScoredRows, scored_sequence
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.plan import ProgramEntry
from specbuild.runtime.errors import RequestError
from specbuild.runtime.executors.executor import DeviceExecutor


def score_on_device(
    ids: Sequence[int], executor: DeviceExecutor, manifest: Manifest, kv: KvPools
) -> Iterator[ScoredRows]:
    """Yield the rows in order, as many at a time as the programs allow. Nothing else may run.

    Raises RequestError if the engine has no scoring program or too few pages are free.
    """
    programs, logits = ProgramTable(executor.plan), executor.port("score.logits")
    entry = None if logits is None else programs.score(rows=logits.shape[0])
    if entry is None or logits is None:
        raise RequestError("the engine has no scoring program; rebuild it with one")
    executor.use()
    groups = [group.name for group in manifest.cache_groups]
    device_rows = DeviceRows(executor, groups)
    device_rows.clear(manifest.target.eos_token_ids)
    pages = DevicePages(device_rows, manifest)
    with scored_sequence(ids, kv) as sequence:
        device_rows.admit(sequence)
        capacity = min(entry.rows, logits.shape[0])
        for start in range(0, len(ids), capacity):
            rows = PromptRows(0, sequence, start, min(capacity, len(ids) - start))
            pages.before_prefill(sequence, start + rows.count)
            entry = programs.score(rows=rows.count)
            assert entry is not None
            arrays = prefill_arrays([rows], entry, groups, has_draft=device_rows.has_draft)
            scores = _run_score_program(executor, entry, rows, arrays)
            sequence.length += rows.count
            pages.after_prefill(sequence)
            yield scores


def _run_score_program(
    executor: DeviceExecutor,
    entry: ProgramEntry,
    rows: PromptRows,
    arrays: Mapping[str, np.ndarray],
) -> ScoredRows:
    port = executor.port("score.logit_rows")
    assert port is not None
    for name, values in arrays.items():
        executor.write(name, values)
    logit_rows = np.minimum(np.arange(port.shape[0], dtype=np.int32), rows.count - 1)
    executor.write(port.name, logit_rows)
    executor.start(entry)
    logits = executor.read("score.logits", rows=rows.count)
    has_draft = executor.port("score.captured") is not None
    aux_hidden = executor.read("score.captured", rows=rows.count) if has_draft else None
    return ScoredRows(rows.start, logits, aux_hidden)
