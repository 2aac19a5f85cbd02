"""One engine on several fake GPUs: the same work on each, and one sentence per failure."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fake_gpu import HOPPER
from fake_ranks import LOST, RankGpu, ToyRanks, state_of, toy_ranks
from toy_device import toy_cuda
from toy_engine import run

from specbuild.runtime.engine_dir.plan import EXCHANGE_EPOCH, EXCHANGE_LIMIT
from specbuild.runtime.errors import SpecbuildError, UnsupportedHereError
from specbuild.runtime.executors.cuda import ranked
from specbuild.runtime.executors.cuda.check import ranked_reasons
from specbuild.runtime.measure.benchmark_batch import cuda_executor
from specbuild.runtime.request import GenerateParams

PROMPTS = ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7])
PARAMS = GenerateParams(max_new_tokens=12, ignore_eos=True)


def tokens(toy: ToyRanks) -> list[list[int]]:
    return [list(record.output_ids) for record in run(toy.engine, PROMPTS, PARAMS).records]


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_does_the_same_work(ranks: int) -> None:
    toy, alone = toy_ranks(ranks), toy_cuda()
    assert tokens(toy) == tokens(alone)
    first = state_of(toy, 0)
    for rank in range(1, ranks):
        assert toy.devices[rank].started == toy.devices[0].started
        assert state_of(toy, rank) == first
    assert all(len(gpu.reached) == ranks - 1 for gpu in toy.gpus)
    limit = toy.devices[1].port(EXCHANGE_LIMIT)
    assert limit.tolist() == [ranked.LIMIT_MS]
    toy.executor.close()
    # What is left is the host's memory that the toy's weights came from.
    assert all(gpu.closed and gpu.allocations == 1 for gpu in toy.gpus)


def test_round_numbers_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they repeat: with empty inboxes, and nothing in flight."""
    monkeypatch.setattr(ranked, "MAX_ROUNDS", 20)
    toy = toy_ranks(2)
    inbox = next(
        i for i, buffer in enumerate(toy.executor.plan.buffers) if buffer.space == "exchange"
    )
    for gpu, rank in zip(toy.gpus, toy.executor.ranks, strict=True):
        gpu.view(rank.addresses[inbox], 4096)[:] = 7
        toy.devices[gpu.number].port(EXCHANGE_EPOCH)[:] = 5
    assert tokens(toy) == tokens(toy_cuda())
    toy.executor.synchronize()
    for gpu, rank in zip(toy.gpus, toy.executor.ranks, strict=True):
        assert not gpu.view(rank.addresses[inbox], 4096).any()
        assert toy.devices[gpu.number].port(EXCHANGE_EPOCH).tolist() == [0]


def calls_of_a_run(rank: int) -> int:
    toy = toy_ranks(2)
    tokens(toy)
    return toy.gpus[rank].calls


@pytest.mark.parametrize("rank", [0, 1])
def test_the_error_names_a_failing_gpu_in_any_call(rank: int) -> None:
    """From each of its calls on, in a run with drafts. The others are not named."""
    count = calls_of_a_run(rank)
    assert count > 200
    for fails_at in range(1, count, max(1, count // 60)):
        with pytest.raises(SpecbuildError) as raised:
            tokens(toy_ranks(2, failing=rank, fails_at=fails_at))
        sentence = str(raised.value)
        assert LOST in sentence, fails_at
        named = [n for n in (0, 1) if f"GPU {n}: " in sentence]
        # While it is being set up, the call that failed says it.
        assert named in ([], [rank]), sentence
        if f"GPU {1 - rank} waited" in sentence:
            assert f"waited 20 s for GPU {rank} in exchange 3" in sentence


def test_a_runtime_failure_names_the_waiting_ranks() -> None:
    count = calls_of_a_run(1)
    with pytest.raises(SpecbuildError) as raised:
        tokens(toy_ranks(2, failing=1, fails_at=count - 30))
    sentence = str(raised.value)
    assert sentence.startswith("GPU 1: ") and LOST in sentence
    assert "; GPU 0 waited 20 s for GPU 1 in exchange 3 of prefill@" in sentence


def alike(count: int) -> list[RankGpu]:
    gpus: list[RankGpu] = []
    for _ in range(count):
        RankGpu(gpus, {}, dataclasses.replace(HOPPER, total_bytes=1 << 40))
    return gpus


def reasons(gpus: list[RankGpu]) -> list[str]:
    plan = toy_ranks(len(gpus)).executor.plan
    return ranked_reasons(plan, gpus, [4, 6, 7][: len(gpus)])


def test_accepts_equal_gpus_with_peer_access() -> None:
    assert reasons(alike(2)) == []


def test_missing_requirements_are_listed_for_each_gpu() -> None:
    gpus = alike(2)
    gpus[1].facts = dataclasses.replace(HOPPER, name="Fake H100", total_bytes=1000)
    gpus[1].unreachable = True
    memory, other, unreachable = reasons(gpus)
    assert memory.startswith("GPU 6: ") and "are free" in memory
    assert "GPU 4 is an Fake H200, GPU 6 an Fake H100" in other
    assert "GPU 4 and GPU 6 cannot read each other's memory" in unreachable


def test_values_are_written_to_all_ranks_and_read_from_one() -> None:
    toy = toy_ranks(2)
    executor = toy.executor
    executor.write("limit", np.array([5, 6], np.int32), row=1)
    executor.fill("limit", 9)
    executor.copy("limit", 1, "limit", 3)
    assert executor.read("limit").tolist() == [9, 5, 6, 5]
    assert executor.fetch("limit")().tolist() == [9, 5, 6, 5]
    executor.synchronize()
    assert toy.devices[1].port("limit").tolist() == [9, 5, 6, 5]


def test_steps_of_several_gpus_are_not_timed() -> None:
    toy = toy_ranks(2)
    toy.engine.manifest = dataclasses.replace(toy.engine.manifest, ranks=2)
    with pytest.raises(UnsupportedHereError, match="this engine runs on 2 GPUs"):
        cuda_executor(toy.engine)
