"""Sequences of random tokens on a device, ready to be decoded: what steps are timed on."""

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
from specbuild.runtime.engine_dir.plan import FULL_STEP, LIST_BUDGET, OFFERED, ProgramEntry
from specbuild.runtime.errors import UnsupportedHereError
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.request import GenerateParams, Prompt

# Events of each sequence before its steps are timed: a step of its own has then run.
_SETTLED_EVENTS = 2
# Enough tokens that no sequence ends while its steps are timed, where all that fit are too many.
_FEWEST_TOKENS = 128
_FED_AGAIN = "buffered_tokens"


@dataclass(frozen=True)
class BenchmarkBatch:
    """``reset`` queues what puts the sequences back to where they were placed.

    ``tokens`` [batch, context] are theirs.
    """

    executor: CudaExecutor
    batch: int
    reset: Callable[[], None]
    tokens: np.ndarray

    @property
    def context(self) -> float:
        """Tokens in the target's cache, on average over the sequences."""
        return float(self.executor.read("length", rows=self.batch).mean())

    def offer(self, entry: ProgramEntry) -> None:
        """Puts whole chains of the sequences' own tokens where a step finds the host's."""
        chains = np.resize(self.tokens.T, (entry.draft_tokens, self.batch)).T
        self.executor.write(OFFERED, host_chain_values(entry, dict(enumerate(chains))))


def cuda_executor(engine: Engine) -> CudaExecutor:
    """The engine's executor; UnsupportedHereError where its steps do not run on one GPU."""
    if not isinstance(engine.executor, CudaExecutor):
        ranks = engine.manifest.ranks
        where = "the host" if ranks == 1 else f"{ranks} GPUs; time one without --tensor-parallel"
        raise UnsupportedHereError(f"steps are timed on one GPU, this engine runs on {where}")
    return engine.executor


def tokens_left(engine: Engine, *, batch: int, context: int) -> int:
    """Tokens that each of so many sequences may emit behind its context.

    0 where the engine's pages hold too few for steps to be timed: no sequence may end meanwhile.
    """
    manifest = engine.manifest
    groups, limits = manifest.cache_groups, manifest.limits
    most = limits.max_seq_len - context
    for left in (most, min(most, _FEWEST_TOKENS)):
        if sequences_together(groups, limits, context + left) >= batch:
            return left
    return 0


@contextlib.contextmanager
def benchmark_batch(
    engine: Engine, *, batch: int, context: int, shape: DraftShape | None
) -> Iterator[BenchmarkBatch]:
    """Takes up ``batch`` random prompts of ``context`` tokens and runs their first steps.

    The steps draft as ``shape`` says. Afterwards the sequences are gone.
    """
    executor = cuda_executor(engine)
    random = np.random.default_rng(0)
    ids = random.integers(0, engine.manifest.target.vocab, (batch, context))
    prompts = [Prompt(str(b), prompt_ids=tuple(map(int, row))) for b, row in enumerate(ids)]
    left = tokens_left(engine, batch=batch, context=context)
    if left == 0:
        raise UnsupportedHereError(
            f"the engine's pages do not hold {batch} sequences of {context} tokens; take fewer or "
            "shorter ones, or build it with more --kv-pages"
        )
    params = GenerateParams(max_new_tokens=left, ignore_eos=True)
    requests = engine.check_prompts(prompts, params)
    with engine.session.exclusive(requests, DraftSetting(shape)) as events:
        seen = [0] * batch
        while min(seen) < _SETTLED_EVENTS:
            seen[next(events).request] += 1
        # Sparse steps are so in full, whatever the first ones, which are checked, did.
        if engine.manifest.dsa is not None:
            executor.fill(LIST_BUDGET, engine.manifest.dsa.top_k, rows=batch)
        _keep_ends(executor, ids)
        reset = _keep_state(executor)
        yield BenchmarkBatch(executor, batch, reset, ids)
        reset()


def _keep_ends(executor: CudaExecutor, ids: np.ndarray) -> None:
    """Puts the prompts' last tokens where an engine with SpecPV finds what a full step re-verifies.

    It keeps emitted tokens only, of which there are few yet. A step that is timed as one behind
    many partial steps would feed the same token over and over, and rows of one token choose the
    same experts.
    """
    if executor.port(_FED_AGAIN) is None:
        return
    batch, context = ids.shape
    kept = executor.read(_FED_AGAIN, rows=batch).copy()
    capacity = kept.shape[1]
    for b, length in enumerate(executor.read("length", rows=batch)):
        ends = np.arange(max(0, int(length) - capacity), context)
        kept[b, ends % capacity] = ids[b, ends]
    executor.write(_FED_AGAIN, kept)


def _keep_state(executor: CudaExecutor) -> Callable[[], None]:
    """What puts the sequences back where they are now; it queues the writes and returns."""
    known = (*SEQUENCE_PORTS, *VIEWS, FULL_STEP)
    ports = [name for name in known if executor.port(name) is not None]
    kept = {name: executor.read(name) for name in ports}

    def restore() -> None:
        for name, values in kept.items():
            executor.write(name, values)

    return restore
