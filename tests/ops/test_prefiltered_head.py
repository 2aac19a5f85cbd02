"""Int8-prefiltered heads select HeadChoose's tokens, bit for bit, for any weight and rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulation import Guarded, emulate, guarded, has_compiler, run_lowering
from hypothesis import given, settings
from hypothesis import strategies as st
from left_out import examples

from specbuild.builder.backends.cuda.tuning.kernel_case import bits
from specbuild.plugins_cuda.head_screen.screen import screen_errors, screened
from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, Tactic, Target, TensorInfo
from specbuild.plugins_cuda.linear.block_scaled import decoded
from specbuild.plugins_cuda.linear.packing import pack_rows, unpack_rows
from specbuild.plugins_cuda.linear.storage import INT8
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.errors import SpecbuildError

K, VOCAB = 96, 336
TARGET = Target(multiprocessors=3)
NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.int32: "int32",
         torch.uint8: "uint8"}  # fmt: skip


def lowered(
    name: str, inputs: dict[str, torch.Tensor], target: Target, tactic: Tactic
) -> tuple[Lowering, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the launches of a head, and its inputs and empty outputs as the kernels get them."""
    op, rows = op_named(name), len(inputs["logit_rows"])
    named = {spec.name: inputs[spec.name] for spec in op.inputs}
    blank = {"choice": torch.zeros(rows, dtype=torch.int32), "logprob": torch.zeros(rows)}
    tensors = {n: TensorInfo(tuple(t.shape), NAMES[t.dtype]) for n, t in (named | blank).items()}
    attributes = op.complete({"eps": 1e-5, "rounding": "llama"})
    assert op.lower is not None
    lowering = op.lower(LoweringRequest(tensors, attributes, "decode", target, tactic))
    given, outputs = ({n: bits(t) for n, t in some.items()} for some in (named, blank))
    return lowering, given, outputs


def head_inputs(
    weight: torch.Tensor, x: torch.Tensor, temperature: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the inputs of both heads for a weight [V, K] and rows [R, K]."""
    packed, ids = pack_rows(weight), torch.arange(len(x), dtype=torch.int32)
    return {
        "x": x, "logit_rows": ids.flip(0).contiguous(), "norm": torch.ones(x.shape[1]).bfloat16(),
        "weight": packed, "codes": screened(packed), "errors": screen_errors(packed),
        "temperature": temperature, "seed": ids + 7, "position": ids + 100,
    }  # fmt: skip


def both(weight: torch.Tensor, x: torch.Tensor, temperature: torch.Tensor) -> list[np.ndarray]:
    """Return the tokens of HeadChoose and HeadScreen for a weight [V, K] and rows [R, K]."""
    inputs = head_inputs(weight, x, temperature)
    exact, result = (
        run_lowering(op_named(name), *lowered(name, inputs, TARGET, {}))
        for name in ("HeadChoose", "HeadScreen")
    )
    # The log-probability is not computed, but rows of NaN are still distinguished.
    np.testing.assert_array_equal(np.isnan(result["logprob"]), np.isnan(exact["logprob"]))
    assert not np.isfinite(result["logprob"]).any()
    return [exact["choice"], result["choice"]]


def nearly_equal_rows(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Change only one bit of a few values from row to row, so that logits nearly tie."""
    near = weight[torch.arange(len(weight)) % 8].clone()
    column = torch.randint(0, near.shape[1], (len(near), 2), generator=generator)
    raw = near.view(torch.int16)
    raw.scatter_(1, column, raw.gather(1, column) ^ 1)
    return near


@pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
@examples(12)
@given(st.data())
def test_tokens_equal_those_of_bf16_logits(data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    rows = data.draw(st.sampled_from([1, 3, 8, 32]))
    scale = data.draw(st.sampled_from([1e-30, 0.02, 1.0, 40.0, 1e4]))
    weight = (torch.randn(VOCAB, K, generator=generator) * scale).bfloat16()
    form = data.draw(st.sampled_from(["any", "near ties", "zero rows", "a huge row", "all equal"]))
    if form == "near ties":
        weight = nearly_equal_rows(weight, generator)
    if form == "zero rows":
        weight[torch.rand(VOCAB, generator=generator) < 0.5] = 0.0
    if form == "a huge row":
        weight[data.draw(st.integers(0, VOCAB - 1))] *= 1000.0
    if form == "all equal":
        weight = weight[:1].repeat(VOCAB, 1)
    x = torch.randn(rows, K, generator=generator).bfloat16()
    if data.draw(st.booleans()):
        x[0] = 0.0
    temperature = torch.rand(rows, generator=generator) * 2
    temperature[:: data.draw(st.integers(1, 2))] = 0.0
    exact, chosen = both(weight.contiguous(), x, temperature)
    np.testing.assert_array_equal(chosen, exact)


def bounds(inputs: dict[str, torch.Tensor]) -> list[np.ndarray]:
    """Return the first launch's bounds for each row: of every tile's scores, and of the best score.

    One CTA has 32 segments of two tiles, so each warp has two segments.
    """
    lowering, given, _ = lowered("HeadScreen", inputs, Target(multiprocessors=2), {"ctas": 1})
    memory = {name: guarded(array) for name, array in given.items()}
    for workspace in lowering.workspaces:
        memory[workspace.name] = Guarded(workspace.nbytes)
        memory[workspace.name].data[:] = 0
    emulate(lowering.launches[0], memory)
    rows = len(given["logit_rows"])
    uppers, best = (
        memory[name].data.view(np.uint32).reshape(rows, -1)
        for name in ("workspace_uppers", "workspace_best")
    )
    assert best.all()
    return [uppers, best]


@pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
def test_bounds_of_a_row_do_not_depend_on_other_rows() -> None:
    """With more than 16 rows, the best bounds are in shared memory instead of registers."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(1024, K, generator=generator).bfloat16()
    x = torch.randn(27, K, generator=generator).bfloat16()
    temperature = torch.rand(27, generator=generator).where(torch.arange(27) % 3 > 0, 0.0)
    inputs = head_inputs(weight, x, temperature)
    together = bounds(inputs)
    per_row = ("logit_rows", "temperature", "seed", "position")
    for first, last in ((0, 8), (8, 16), (16, 27)):
        rows = {name: inputs[name][first:last].contiguous() for name in per_row}
        for some, every in zip(bounds(inputs | rows), together, strict=True):
            np.testing.assert_array_equal(some, every[first:last])


@pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
def test_a_padding_row_of_nan_reads_no_weight_and_changes_no_row() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(VOCAB, K, generator=generator).bfloat16()
    x = torch.randn(3, K, generator=generator).bfloat16()
    whole = both(weight, x, torch.zeros(3))[1]
    x[1] = float("nan")
    exact, chosen = both(weight, x, torch.zeros(3))
    assert chosen[[0, 2]].tolist() == exact[[0, 2]].tolist() == whole[[0, 2]].tolist()
    assert chosen[1] == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1e-38, 1e-3, 0.05, 1.9, 2.1, 300.0]))
def test_int8_logits_are_within_their_bounds(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(32, 160, generator=generator) * scale).bfloat16()
    packed = pack_rows(weight)
    codes = unpack_rows(decoded(screened(packed), 160, INT8))
    rows = torch.randn(4, 160, generator=generator).bfloat16()
    # Rows with the largest error: parallel to the rounding error.
    worst = (weight.double() - codes.double()).bfloat16()
    rows = torch.cat([rows, worst[worst.abs().amax(1) > 0][:4]])
    exact, read = rows.float() @ weight.float().T, rows.float() @ codes.float().T
    bound = rows.double().norm(dim=1, keepdim=True) * screen_errors(packed).double()
    assert bool(((exact.double() - read.double()).abs() <= bound).all())


def test_int8_rounding_error_is_at_most_half_a_step() -> None:
    """Compare with the definition, block by block; values of 2 or larger get the largest code."""
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(16, 128, generator=generator) * 0.3).bfloat16()
    weight[3, 5], weight[4] = 7.0, 0.0
    codes = unpack_rows(decoded(screened(pack_rows(weight)), 128, INT8)).float()
    blocks, read = weight.float().view(16, 4, 32), codes.view(16, 4, 32)
    for row in range(16):
        for block in range(4):
            values, result = blocks[row, block], read[row, block]
            most = float(values.abs().max())
            exponent = -133 if most == 0 else max(-133, int(np.ceil(np.log2(most / 127))))
            step = 2.0 ** min(-6, exponent)
            expected = (values / step).round().clamp(-127, 127) * step
            assert torch.equal(result, expected), (row, block)


def test_rejects_more_than_32_rows() -> None:
    weight, x = torch.zeros(16, 32).bfloat16(), torch.zeros(33, 32).bfloat16()
    with pytest.raises(SpecbuildError, match="HeadScreen: got 33 rows, expected at most 32"):
        both(weight, x, torch.zeros(33))
