"""RankHeadChoose and RankHeadScreen on several ranks: each rank has the choice of the full head."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulation import has_compiler, tensor_info
from rank_emulation import DONE, RankEmulator, placed

from specbuild.builder.backends.cuda.tuning.kernel_case import bits
from specbuild.plugins_cuda.head_choose.op import OP as HEAD_CHOOSE
from specbuild.plugins_cuda.head_screen.screen import screen_errors, screened
from specbuild.plugins_cuda.launches import LoweringRequest, Target
from specbuild.plugins_cuda.linear.packing import pack_rows
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.rank_head_choose.lowering import ROW_WORDS
from specbuild.plugins_cuda.rank_head_choose.op import OP, contribution
from specbuild.plugins_cuda.rank_head_screen.op import OP as SCREEN

emulated = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
HIDDEN, VOCAB = 64, 192


def head(rows: int, *, ties: bool) -> dict[str, torch.Tensor]:
    """Return the inputs of HeadChoose; with ``ties`` each logit occurs once on each rank."""
    generator = torch.Generator().manual_seed(rows)
    distinct = VOCAB // 4 if ties else VOCAB
    weight = torch.randn(distinct, HIDDEN, generator=generator).repeat(VOCAB // distinct, 1)
    return {
        "x": torch.randn(rows, HIDDEN, generator=generator).bfloat16(),
        "logit_rows": torch.arange(rows, dtype=torch.int32),
        "norm": torch.ones(HIDDEN).bfloat16(),
        "weight": pack_rows(weight.bfloat16()).contiguous(),
        "temperature": torch.tensor([0.0, 1.0, 0.3])[torch.arange(rows) % 3],
        "seed": torch.arange(rows, dtype=torch.int32) * 7919,
        "position": torch.arange(rows, dtype=torch.int32) + 100,
    }


def of_ranks(full_inputs: dict[str, torch.Tensor], ranks: int) -> list[dict[str, torch.Tensor]]:
    """Return each rank's tiles of the weight, and an inbox and a counter after earlier rounds."""
    rows = len(full_inputs["logit_rows"])
    exchange = {
        "inbox": torch.zeros(2, ranks - 1, rows * ROW_WORDS, 2, dtype=torch.int32),
        "state": torch.tensor([9, 20_000], dtype=torch.int32),
        "fault": torch.zeros(8, dtype=torch.int32),
    }
    parts = full_inputs["weight"].chunk(ranks)
    return [full_inputs | {"weight": part.contiguous()} | exchange for part in parts]


ATTRIBUTES = {"eps": 1e-5, "rounding": "gpt_oss"}


def run_on_ranks(
    op: OpSpec, inputs: list[dict[str, torch.Tensor]], seed: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return each rank's choice and log-probability.

    The ranks run concurrently in the last launch only.
    """
    ranks, rows = len(inputs), len(inputs[0]["logit_rows"])
    outputs = {"choice": np.zeros(rows, np.int32), "logprob": np.zeros(rows, np.float32)}
    arrays = {name: bits(tensor) for name, tensor in inputs[0].items()} | outputs
    request = LoweringRequest(
        {name: tensor_info(array) for name, array in arrays.items()},
        op.complete(ATTRIBUTES | {"ranks": ranks, "exchange": 0}),
        "decode", Target(multiprocessors=3),
    )  # fmt: skip
    lowering = op.lowered(request)
    scratch = {w.name: np.zeros(w.nbytes, np.uint8) for w in lowering.workspaces}
    memories = [
        placed({n: bits(t) for n, t in of_rank.items()} | outputs | scratch) for of_rank in inputs
    ]
    emulator, (*alone, exchange) = RankEmulator(ranks), lowering.launches
    for rank in range(ranks):
        own = [alone if other == rank else [] for other in range(ranks)]
        assert emulator.run(own, memories, seed=rank) == DONE
    assert emulator.run([[exchange]] * ranks, memories, seed=seed) == DONE
    for memory in memories:
        for workspace in (w for w in lowering.workspaces if w.zeroed):
            assert not memory[workspace.name].data.any(), workspace.name
    return [
        (memory["choice"].data.view(np.int32), memory["logprob"].data.view(np.float32))
        for memory in memories
    ]


@emulated
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("rows", "ties"), [(5, False), (6, True), (40, False)])
def test_every_rank_has_the_choice_of_the_full_head(ranks: int, rows: int, ties: bool) -> None:
    full_inputs = head(rows, ties=ties)
    expected, logprob = HEAD_CHOOSE.reference(*full_inputs.values(), **ATTRIBUTES)
    choices = run_on_ranks(OP, of_ranks(full_inputs, ranks), seed=rows)
    for choice, of_choice in choices:
        np.testing.assert_array_equal(choice, expected.numpy())
        np.testing.assert_allclose(of_choice, logprob.numpy(), atol=3e-3)
        np.testing.assert_array_equal(of_choice, choices[0][1])


@emulated
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("rows", "ties"), [(5, False), (6, True), (32, False)])
def test_prefiltered_heads_of_ranks_have_the_choice_of_the_full_head(
    ranks: int, rows: int, ties: bool
) -> None:
    """Each rank resolves the candidates of its own bounds.

    A row of NaN has no choice on any rank.
    """
    full_inputs = head(rows, ties=ties)
    expected, _ = HEAD_CHOOSE.reference(*full_inputs.values(), **ATTRIBUTES)
    full_inputs["x"][-1] = torch.nan
    inputs = [screened_inputs(of_rank) for of_rank in of_ranks(full_inputs, ranks)]
    for choice, logprob in run_on_ranks(SCREEN, inputs, seed=rows):
        np.testing.assert_array_equal(choice[:-1], expected.numpy()[:-1])
        assert choice[-1] == 0
        assert np.isposinf(logprob[:-1]).all()
        assert np.isnan(logprob[-1])
    sent = [contribution(*of_rank.values(), **ATTRIBUTES) for of_rank in inputs]
    options = ATTRIBUTES | {"ranks": ranks, "exchange": 0}
    for of_rank in inputs:
        choice, logprob = SCREEN.reference(*of_rank.values(), **options, contributions=sent)
        assert torch.equal(choice[:-1], expected[:-1])
        assert torch.isposinf(logprob).all()


def screened_inputs(of_rank: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the inputs with the int8 values of the rank's tiles, in the op's order."""
    forms = {"codes": screened(of_rank["weight"]), "errors": screen_errors(of_rank["weight"])}
    return {spec.name: (of_rank | forms)[spec.name] for spec in SCREEN.inputs}


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_reference_equals_that_of_the_full_head(ranks: int) -> None:
    full_inputs = head(12, ties=True)
    inputs = [list(of_rank.values()) for of_rank in of_ranks(full_inputs, ranks)]
    sent = [contribution(*of_rank, **ATTRIBUTES) for of_rank in inputs]
    expected = HEAD_CHOOSE.reference(*full_inputs.values(), **ATTRIBUTES)
    for of_rank in inputs:
        results = OP.reference(*of_rank, **ATTRIBUTES, ranks=ranks, exchange=3, contributions=sent)
        for actual, desired in zip(results, expected, strict=True):
            torch.testing.assert_close(actual, desired)
