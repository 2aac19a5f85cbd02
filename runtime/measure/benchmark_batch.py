"""Sequences of random tokens on a device, on which decoding steps are timed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.decode.device.proposals import host_chain_values
from specbuild.runtime.decode.device.rows import SEQUENCE_PORTS, VIEWS
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.cache_groups import sequences_together
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import (
    FULL_STEP,
    LIST_BUDGET,
    OFFERED,
    ROW_COUNTS,
    ProgramEntry,
)
from specbuild.runtime.errors import UnsupportedHereError
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.request import GenerateParams, Prompt

# The number of events of each sequence before its steps are timed, so that it has run a step.
_EVENTS_BEFORE_TIMING = 2
# Enough tokens that no sequence ends while its steps are timed, if not all that fit can be used.
_MIN_TOKENS = 128
_REVERIFIED_TOKENS = "buffered_tokens"


@dataclass(frozen=True)
class BenchmarkBatch:
    """Sequences on a device; ``reset`` queues the writes that restore their initial state.

    ``tokens`` [batch, context] are the tokens of the sequences.
    """

    executor: CudaExecutor
    batch: int
    reset: Callable[[], None]
    tokens: np.ndarray

    @property
    def context(self) -> float:
        """The number of tokens in the target's cache, averaged over the sequences."""
        return float(self.executor.read("length", rows=self.batch).mean())

    def offer(self, entry: ProgramEntry) -> None:
        """Write chains of maximum length from the sequences' tokens as host proposals."""
        length = entry.rows // entry.batch - 1
        chains = np.resize(self.tokens.T, (length, self.batch)).T
        self.executor.write(OFFERED, host_chain_values(entry, dict(enumerate(chains))))

    def give_rows(self, entry: ProgramEntry) -> None:
        """Gives each sequence an equal share of the rows of a ragged step."""
        counts = np.full(entry.batch, entry.rows // entry.batch, np.int32)
        self.executor.write(ROW_COUNTS, counts)


def cuda_executor(engine: Engine) -> CudaExecutor:
    """Return the engine's executor; UnsupportedHereError if its steps do not run on one GPU."""
    if not isinstance(engine.executor, CudaExecutor):
        ranks = engine.manifest.ranks
        where = "the host" if ranks == 1 else f"{ranks} GPUs; time one without --tensor-parallel"
        raise UnsupportedHereError(f"steps are timed on one GPU, this engine runs on {where}")
    return engine.executor


def tokens_left(engine: Engine, *, batch: int, context: int) -> int:
    """Return the number of tokens that each sequence of a batch may emit after its context.

    It is 0 if the engine has too few pages to time steps: no sequence may end meanwhile.
    """
    manifest = engine.manifest
    groups, limits = manifest.cache_groups, manifest.limits
    max_tokens = limits.max_seq_len - context
    for remaining in (max_tokens, min(max_tokens, _MIN_TOKENS)):
        if sequences_together(groups, limits, context + remaining) >= batch:
            return remaining
    return 0


@contextlib.contextmanager
def benchmark_batch(
    engine: Engine, *, batch: int, context: int, shape: DraftShape | None
) -> Iterator[BenchmarkBatch]:
    """Prefill ``batch`` random prompts of ``context`` tokens and run their first steps.

    The steps draft with ``shape``. The sequences are removed when the context ends.
    """
    executor = cuda_executor(engine)
    random = np.random.default_rng(0)
    ids = random.integers(0, engine.manifest.target.vocab, (batch, context))
    prompts = [Prompt(str(b), prompt_ids=tuple(map(int, row))) for b, row in enumerate(ids)]
    remaining = tokens_left(engine, batch=batch, context=context)
    if remaining == 0:
        raise UnsupportedHereError(
            f"the engine's pages do not hold {batch} sequences of {context} tokens; take fewer or "
            "shorter ones, or build it with more --kv-pages"
        )
    params = GenerateParams(max_new_tokens=remaining, ignore_eos=True)
    requests = engine.check_prompts(prompts, params)
    with engine.session.exclusive(requests, DraftSetting(shape)) as events:
        event_counts = [0] * batch
        while min(event_counts) < _EVENTS_BEFORE_TIMING:
            event_counts[next(events).request] += 1
        # Sparse steps use their full budget, whatever the first steps, which are checks, decided.
        if engine.manifest.dsa is not None:
            executor.fill(LIST_BUDGET, engine.manifest.dsa.top_k, rows=batch)
        _write_last_tokens(executor, ids)
        reset = _state_restorer(executor)
        yield BenchmarkBatch(executor, batch, reset, ids)
        reset()


def _write_last_tokens(executor: CudaExecutor, ids: np.ndarray) -> None:
    """Write the prompts' last tokens to SpecPV's buffer of tokens to re-verify.

    The buffer has emitted tokens only, of which there are few yet. A timed step that re-verifies
    many would otherwise read one token many times, and rows with one token select the same experts.
    """
    if executor.port(_REVERIFIED_TOKENS) is None:
        return
    batch, context = ids.shape
    buffer = executor.read(_REVERIFIED_TOKENS, rows=batch).copy()
    capacity = buffer.shape[1]
    for b, length in enumerate(executor.read("length", rows=batch)):
        ends = np.arange(max(0, int(length) - capacity), context)
        buffer[b, ends % capacity] = ids[b, ends]
    executor.write(_REVERIFIED_TOKENS, buffer)


def _state_restorer(executor: CudaExecutor) -> Callable[[], None]:
    """Return a function that queues the writes which restore the current state of the sequences."""
    all_ports = (*SEQUENCE_PORTS, *VIEWS, FULL_STEP)
    ports = [name for name in all_ports if executor.port(name) is not None]
    saved = {name: executor.read(name) for name in ports}

    def restore() -> None:
        for name, values in saved.items():
            executor.write(name, values)

    return restore
