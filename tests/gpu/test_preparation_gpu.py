"""Programs that a server loads ahead: the first requests record no graph, with the same bits."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from example_engine import on_gpu, outputs, records

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.engine import Engine
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.executors.cuda.memory import RESERVE_BYTES
from specbuild.runtime.request import GenerateParams, Prompt

PARAMS = GenerateParams(max_new_tokens=256, ignore_eos=True)


def graphs(engine: Engine) -> set[str]:
    """Return the names of the programs that are recorded."""
    assert isinstance(engine.executor, CudaExecutor)
    return set(engine.executor.runner._graphs)


def prepare(engine: Engine) -> tuple[float, float]:
    """Load all likely programs. Return the seconds of those of one sequence, and of all."""
    start_s = time.perf_counter()
    engine.session.prepare(DraftSetting(), PARAMS)
    first_s = time.perf_counter() - start_s
    while engine.session._preparation is not None:
        time.sleep(1e-3)
    return first_s, time.perf_counter() - start_s


def test_the_first_requests_record_no_graph(directory: Path, prompts: list[Prompt]) -> None:
    with on_gpu(directory) as fresh:
        expected = [outputs(records(fresh, prompts[:n], PARAMS)) for n in (1, 2, 8)]
    with on_gpu(directory) as engine:
        prepare(engine)
        before = graphs(engine)
        assert before
        assert [outputs(records(engine, prompts[:n], PARAMS)) for n in (1, 2, 8)] == expected
        assert graphs(engine) == before


# It runs alone, because other tests allocate memory of the same GPU.
@pytest.mark.speed
def test_loaded_programs_fit_into_the_memory_reserved_for_them(directory: Path) -> None:
    """An engine may fill all other memory, and further programs are loaded at their first use."""
    with on_gpu(directory) as engine:
        executor = engine.executor
        assert isinstance(executor, CudaExecutor)
        runner = executor.runner
        executor.use()
        free_bytes = runner.gpu.free_bytes()
        prepare(engine)
        executor.use()
        used = free_bytes - runner.gpu.free_bytes()
        entries = [entry for entry in executor.plan.programs if entry.name in graphs(engine)]
        launches = sum(len(runner.launches(entry)) for entry in entries)
    print(f"{len(entries)} programs of {launches} launches: {used / 2**20:.1f} MiB of the GPU")
    assert used < RESERVE_BYTES


@pytest.mark.speed
def test_the_first_request_is_as_fast_as_later_ones(directory: Path, prompts: list[Prompt]) -> None:
    """It still explores drafts, which later ones do less."""

    def rounds(*, prepared: bool) -> list[float]:
        with on_gpu(directory) as engine:
            if prepared:
                first_s, all_s = prepare(engine)
                number = len(graphs(engine))
                print(f"one sequence {1e3 * first_s:.0f} ms, {number} programs {1e3 * all_s:.0f}")
            times = []
            for _ in range(5):
                start_s = time.perf_counter()
                records(engine, prompts[:1], PARAMS)
                times.append(time.perf_counter() - start_s)
        return times

    for prepared in (False, True):
        times = rounds(prepared=prepared)
        print(f"prepared {prepared}:", " ".join(f"{1e3 * s:.1f}" for s in times), "ms a request")
    # The last rounds are those with programs loaded ahead.
    assert times[0] < 1.15 * sorted(times[1:])[2]
