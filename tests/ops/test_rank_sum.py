"""RankSum on several ranks: any interleaving of ranks, and any order in which words arrive."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from emulation import has_compiler, tensor_info
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rank_emulation import DONE, GAVE_UP, RankEmulator, placed

from specbuild.plugins_cuda.launches import LoweringRequest, OpLaunch
from specbuild.plugins_cuda.rank_advance.op import OP as ADVANCE
from specbuild.plugins_cuda.rank_sum.op import OP
from specbuild.plugins_cuda.rank_sum.rounds import MAX_CTAS, ROUND_ROWS, cut_of, exchange_rounds

emulated = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
LIMIT_MS = 50


def bf16(values: torch.Tensor) -> np.ndarray:
    return values.bfloat16().view(torch.int16).numpy().view(np.uint16)


class Program:
    """Two exchanges of each size on every rank: partial sums and results by name."""

    def __init__(self, ranks: int, sizes: Sequence[tuple[int, int]], epoch: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ranks, self.sizes = ranks, sizes
        words = max(min(rows, ROUND_ROWS) * width for rows, width in sizes)
        state = np.array([epoch, LIMIT_MS], np.uint32).view(np.int32)
        inbox = np.zeros((2, ranks - 1, words, 2), np.int32)
        common = {"inbox": inbox, "state": state, "fault": np.zeros(8, np.int32)}
        arrays = [dict(common) for _ in range(ranks)]
        self.expected, self.launches, first = {}, [], 0
        for i, (rows, width) in enumerate(sizes):
            # The magnitudes differ, so that another order of the sum gives other bits.
            scales = 10.0 ** torch.arange(ranks)[:, None, None]
            partials = torch.randn(ranks, rows, width, generator=generator) * scales
            bias = torch.randn(width, generator=generator).bfloat16()
            residual = torch.randn(rows, width, generator=generator).bfloat16()
            total = partials[0]
            for partial in partials[1:]:
                total = total + partial
            self.expected[f"y{i}"] = bf16(residual + (total + bias).bfloat16())
            for arrays_of_rank, partial in zip(arrays, partials, strict=True):
                arrays_of_rank[f"partial{i}"] = partial.numpy()
                arrays_of_rank[f"bias{i}"] = bf16(bias)
                arrays_of_rank[f"residual{i}"] = bf16(residual)
                arrays_of_rank[f"y{i}"] = np.zeros((rows, width), np.uint16)
            self.launches.append(self._launch(arrays[0], i, first))
            first += exchange_rounds(rows)
        self.rounds = first
        request = LoweringRequest({"state": tensor_info(state)}, {"rounds": first})
        assert ADVANCE.lower is not None
        self.launches += ADVANCE.lower(request).launches
        self.memories = [placed(of_rank) for of_rank in arrays]

    def _launch(self, arrays: dict[str, np.ndarray], i: int, exchange: int) -> OpLaunch:
        own = {name: f"{name}{i}" for name in ("partial", "bias", "residual", "y")}
        names = own | {name: name for name in ("inbox", "state", "fault")}
        tensors = {name: tensor_info(arrays[place]) for name, place in names.items()}
        attributes = {"ranks": self.ranks, "exchange": exchange}
        assert OP.lower is not None
        [launch] = OP.lower(LoweringRequest(tensors, attributes)).launches
        renamed = [own.get(a, a) if isinstance(a, str) else a for a in launch.arguments]
        return OpLaunch(launch.kernel, launch.grid, launch.block, 0, tuple(renamed))

    def check(self) -> None:
        for memory in self.memories:
            for name, expected in self.expected.items():
                result = memory[name].data.view(np.uint16).reshape(expected.shape)
                np.testing.assert_array_equal(result, expected, err_msg=name)


@emulated
@settings(max_examples=12, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    ranks=st.sampled_from([2, 2, 3, 4, 8]),
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    seed=st.integers(0, 2**63),
    epoch=st.sampled_from([0, 7, 2**31 - 5, 2**32 - 5]),
)
def test_every_rank_has_the_sum(ranks: int, rows: list[int], seed: int, epoch: int) -> None:
    program = Program(ranks, [(count, 32) for count in rows], epoch, seed % 1000)
    emulator = RankEmulator(ranks)
    # Run twice: the second run continues the round numbers, with the same arguments.
    launches = [program.launches * 2] * ranks
    assert emulator.run(launches, program.memories, seed) == DONE
    program.check()
    for memory in program.memories:
        counted = memory["state"].data.view(np.uint32)
        assert counted.tolist() == [(epoch + 2 * program.rounds) % 2**32, LIMIT_MS]
        assert not memory["fault"].data.any()


@emulated
@pytest.mark.parametrize("seed", range(4))
def test_more_rows_than_fit_into_one_round(seed: int) -> None:
    program = Program(2, [(2 * ROUND_ROWS + 3, 4), (1, 8)], 11, seed)
    assert program.rounds == 4
    assert RankEmulator(2).run([program.launches] * 2, program.memories, seed) == DONE
    program.check()


@emulated
@pytest.mark.parametrize("missing", [0, 1])
def test_reports_a_rank_that_never_arrives(missing: int) -> None:
    """One rank's launch never runs: the other rank reports whom it waited for, and ends."""
    program = Program(2, [(1, 32), (2, 32)], 40, 1)
    launches = [program.launches[:2], program.launches[:2]]
    launches[missing] = program.launches[:1]
    assert RankEmulator(2).run(launches, program.memories, 5) == GAVE_UP
    waited = program.memories[1 - missing]["fault"].data.view(np.int32).tolist()
    assert waited == [1, 1 - missing, missing, 1, 42, 0, 0, 0]
    assert not program.memories[missing]["fault"].data.any()


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("width", [64, 2048, 2880, 8192])
def test_all_ctas_are_resident(ranks: int, width: int) -> None:
    for rows in (1, 2, 8, 64, 200, 256, 8192):
        cut = cut_of(rows, width, ranks)
        assert 1 <= cut.ctas <= MAX_CTAS and cut.threads <= 1024
        assert cut.pairs * (ranks - 1) <= 8
