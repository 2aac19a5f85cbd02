"""Times steps over partial views against full ones, on a CUDA engine with SpecPV.

    specbuild synth --geometry gpt-oss-20b --draft --unique-layers 2 --engine engine \
        --backend cuda --gpu sm_90a --max-seq-len 131072 --max-batch-size 8 --draft-top-k 1 \
        --draft-depth 3 --draft-tokens 3 --specpv --specpv-n-retrieval-blocks 512
    python benchmarks/specpv_steps.py engine --contexts 8192 32768 130000 --batches 1 8

Each sequence really takes up its prompt and its first steps; then single steps are repeated from
the same state. A row says what a partial step takes (by the blocks that it retrieves), a full one,
and one that feeds a buffer again, then their mix: as many partial steps as the buffer allows at
``--acceptance`` tokens a step, and one refresh of one sequence.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

from specbuild.runtime.engine import Engine
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.executors.cuda.timing import profile_program, time_program
from specbuild.runtime.manifest import DraftShape
from specbuild.runtime.plan import ProgramEntry
from specbuild.runtime.program_table import ProgramTable
from specbuild.runtime.request import GenerateParams, Prompt
from specbuild.runtime.slots import SEQUENCE_PORTS, VIEWS
from specbuild.runtime.specpv import ViewGeometry

OWN_KERNELS = ("kv_block", "view_")


def reset_of(executor: CudaExecutor, changes: dict[str, int], batch: int) -> Callable[[], None]:
    """What puts the sequences' state back to now, but for these values in the first slots."""
    names = [n for n in (*SEQUENCE_PORTS, *VIEWS, "full_step") if executor.port(n) is not None]
    kept = {name: executor.read(name).copy() for name in names}
    for name, value in changes.items():
        kept[name][:batch] = value

    def restore() -> None:
        for name, values in kept.items():
            executor.write(name, values)

    return restore


def prompts_of(engine: Engine, batch: int, context: int) -> list[Prompt]:
    """Random tokens."""
    ids = np.random.default_rng(0).integers(0, engine.manifest.target.vocab, (batch, context))
    return [Prompt(str(b), ids=tuple(map(int, row))) for b, row in enumerate(ids)]


class Steps:
    """Times one engine's steps at one context and batch."""

    def __init__(self, engine: Engine, shape: DraftShape | None, repeats: int) -> None:
        executor = engine.executor
        assert isinstance(executor, CudaExecutor), "a CUDA engine is timed"
        assert engine.manifest.specpv is not None, "build the engine with --specpv"
        self._engine, self._executor, self._shape = engine, executor, shape
        self._repeats = repeats
        self._programs = ProgramTable(executor.plan)
        self.geometry = ViewGeometry(
            engine.manifest.specpv, engine.manifest.group("full").page_size, deepest=1
        )

    def measure(
        self, batch: int, context: int, budgets: list[int], *, profile: bool
    ) -> dict[str, float]:
        """Microseconds by name of what was timed."""
        room = self._engine.manifest.limits.max_seq_len - context
        params = GenerateParams(max_new_tokens=room, ignore_eos=True)
        events = self._engine.generate(
            prompts_of(self._engine, batch, context), params, speculation=self._shape
        )
        found = {}
        try:
            emitted = [0] * batch
            while min(emitted) < 3:
                emitted[next(events).request] += 1
            length = self._executor.read("length")[:batch]
            blocks = self.geometry.summarised_blocks(int(length.min()))
            buffer = self.geometry.config.n_spec_tokens_buf
            step, refresh = self._entry(batch, refresh=False), self._entry(batch, refresh=True)
            for budget in budgets:
                seen = {"full_step": 0, "view_blocks": blocks, "budget": min(budget, blocks)}
                found[f"partial {budget}"] = self._time(step, seen, batch, profile=profile)
            whole = {"full_step": 0, "view_blocks": -1}
            found["whole"] = self._time(step, whole, batch, profile=profile)
            # Everything is exact already: the choice alone is added.
            exact = {"full_step": 1, "verified_len": int(length.max()), "summarised": blocks}
            if len(set(length.tolist())) == 1:
                found["full"] = self._time(refresh, exact, batch, profile=profile)
            chain = {**exact, "full_step": 0, "view_blocks": blocks}
            found["refresh"] = self._refresh(refresh, chain, batch, buffer, profile=profile)
        finally:
            close = getattr(events, "close", None)
            if close is not None:
                close()
        return found

    def _entry(self, batch: int, *, refresh: bool) -> ProgramEntry:
        return self._programs.step(self._shape, batch=batch, full_logits=False, refresh=refresh)

    def _refresh(
        self,
        entry: ProgramEntry,
        changes: dict[str, int],
        batch: int,
        buffer: int,
        *,
        profile: bool,
    ) -> float:
        """The first slot feeds three quarters of a buffer again, the others keep their views."""
        executor = self._executor
        verified = executor.read("verified_len").copy()
        length = executor.read("length")
        restore = reset_of(executor, changes, batch)
        verified[0] = length[0] - 3 * buffer // 4

        def reset() -> None:
            restore()
            executor.write("verified_len", verified)
            executor.write("full_step", np.array([1, *[0] * (batch - 1)], np.int32))

        return self._timed(entry, reset, profile=profile)

    def _time(
        self, entry: ProgramEntry, changes: dict[str, int], batch: int, *, profile: bool
    ) -> float:
        return self._timed(entry, reset_of(self._executor, changes, batch), profile=profile)

    def _timed(self, entry: ProgramEntry, reset: Callable[[], None], *, profile: bool) -> float:
        reset()
        time_s = time_program(self._executor.runner, entry, self._repeats, reset=reset)
        if profile:
            launches = profile_program(self._executor.runner, entry, self._repeats, reset=reset)
            own = sum(t.added_s for t in launches if any(k in t.kernel for k in OWN_KERNELS))
            attention = sum(t.added_s for t in launches if "attention" in t.kernel)
            print(f"    {entry.name}: attention {attention * 1e6:.1f} us, SpecPV's own "
                  f"{own * 1e6:.1f} us of {time_s * 1e6:.1f}", flush=True)  # fmt: skip
        reset()
        return time_s * 1e6


def mix_us(partial: float, refresh: float, acceptance: float, buffer: int, nodes: int) -> float:
    """Mean microseconds of a step where one in so many is a refresh."""
    steps = max(1, int((buffer - nodes - 1) / acceptance))
    return (steps * partial + refresh) / (steps + 1)


def main() -> None:
    """Prints everything as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768, 130000])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--budgets", type=int, nargs="+", default=[32, 64, 128, 256, 512])
    parser.add_argument("--depth", type=int, default=3, help="of the chain; 0 is no draft")
    parser.add_argument("--acceptance", type=float, default=2.5, help="tokens a step")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="attention and SpecPV apart")
    given = parser.parse_args()
    engine = Engine.load(given.engine)
    shape = DraftShape(1, given.depth, given.depth) if given.depth else None
    steps = Steps(engine, shape, given.repeats)
    config = steps.geometry.config
    budgets = [b for b in given.budgets if b <= config.n_retrieval_blocks]
    for context in given.contexts:
        for batch in given.batches:
            times = steps.measure(batch, context, budgets, profile=given.profile)
            shown = ", ".join(f"{name} {value:.0f}" for name, value in times.items())
            print(f"context {context}, batch {batch}: {shown} us", flush=True)
            for budget in budgets:
                mean = mix_us(
                    times[f"partial {budget}"], times["refresh"], given.acceptance,
                    config.n_spec_tokens_buf, given.depth,
                )  # fmt: skip
                rate = batch * given.acceptance / mean * 1e6
                ratio = times["whole"] / mean
                print(
                    f"  {budget:4} blocks: {mean:8.0f} us a step, {rate:7.0f} tokens/s at "
                    f"{given.acceptance} a step, {ratio:.2f} x whole",
                    flush=True,
                )


if __name__ == "__main__":
    main()
