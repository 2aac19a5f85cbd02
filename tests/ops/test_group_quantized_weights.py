"""Weights in the quantized values of a checkpoint: the bits of an engine that dequantizes them.

Kernels decode quantized values to bf16. Every op must then give the bits that it gives for the same
weight in bf16, in every form of its kernels.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulation import has_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from left_out import slow
from test_dense_invariance import normal, run

from specbuild.plugins_cuda.launches import Phase, Tactic
from specbuild.plugins_cuda.linear.block_scaled import decoded
from specbuild.plugins_cuda.linear.cases import draw_codes, draw_groups
from specbuild.plugins_cuda.linear.codec import (
    BLOCK_MINIMUM,
    BLOCK_SCALE,
    MINIMUM,
    SCALE,
    ZERO,
    GroupedCodes,
    GroupPart,
)
from specbuild.plugins_cuda.linear.group_codes import GROUP_STORAGES, pack_codes
from specbuild.plugins_cuda.linear.packing import unpack_rows
from specbuild.plugins_cuda.linear.storage import INT4, INT4_G32, Storage
from specbuild.runtime.errors import SpecbuildError

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
every_storage = pytest.mark.parametrize("storage", GROUP_STORAGES, ids=lambda s: s.name)
# Slices of two and of three blocks, of which neighbours share a unit; a last unit that is half
# full; fewer blocks than warps.
WIDTHS = (1024, 1504, 1536, 224)
FORMS: tuple[tuple[int, Phase, Tactic], ...] = (
    (1, "decode", {}),
    (7, "decode", {"unit": 1}),
    (3, "decode", {"rows": 1, "ring": 4}),
    (14, "decode", {"many": 1, "panels": 0}),
    (20, "decode", {"many": 0}),
    (40, "decode", {"many": 1, "panels": 1}),
    (70, "prefill", {}),
)


@settings(max_examples=40, deadline=None)
@given(
    storage=st.sampled_from(GROUP_STORAGES),
    blocks=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_quantized_values_equal_the_formula_of_the_format(
    storage: Storage, blocks: int, seed: int
) -> None:
    columns = 32 * blocks
    weight = draw_groups(np.random.default_rng(seed), 32, columns, storage)
    packed = pack_codes(weight, storage)
    assert packed.shape == (2, storage.units(blocks), storage.elements)

    def spread(name: str) -> np.ndarray:
        part = weight.parts.get(name)
        if part is None:
            return np.zeros((32, columns)) + (name in (BLOCK_SCALE, BLOCK_MINIMUM))
        return part.numbers.double().numpy()[:, np.arange(columns) // part.columns]

    codes = weight.codes.float().double().numpy() - spread(ZERO)
    scales = (spread(SCALE) * spread(BLOCK_SCALE)).astype(np.float32)
    scaled = codes.astype(np.float32) * scales
    minima = (spread(MINIMUM) * spread(BLOCK_MINIMUM)).astype(np.float32)
    exact = torch.from_numpy(scaled + minima).to(torch.bfloat16)
    assert torch.equal(unpack_rows(decoded(packed, columns)), exact)


def test_rejects_a_scale_that_fp16_cannot_represent() -> None:
    scale = GroupPart(torch.full((16, 1), 2.0**-30), 64)
    zeros = GroupPart(torch.zeros(16, 1), 64)
    weight = GroupedCodes(torch.zeros(16, 64, dtype=torch.uint8), {SCALE: scale, ZERO: zeros})
    with pytest.raises(SpecbuildError, match=r"9\.31323e-10, expected a float16 number"):
        pack_codes(weight, INT4)


@pytest.mark.parametrize("zero", [-1, 16])
@pytest.mark.parametrize(("storage", "columns"), [(INT4_G32, 32), (INT4, 64)])
def test_rejects_a_zero_point_of_more_than_four_bits(
    storage: Storage, columns: int, zero: int
) -> None:
    """compressed-tensors can store a byte for a zero point of four bits."""
    scale = GroupPart(torch.ones(16, 1), columns)
    zeros = GroupPart(torch.full((16, 1), zero, dtype=torch.int16), columns)
    codes = torch.zeros(16, columns, dtype=torch.uint8)
    weight = GroupedCodes(codes, {SCALE: scale, ZERO: zeros})
    with pytest.raises(SpecbuildError, match=f"a zero point of {zero}, expected 0 to 15"):
        pack_codes(weight, storage)


@needs_compiler
@every_storage
@pytest.mark.parametrize("columns", [WIDTHS[0], WIDTHS[1], *slow(*WIDTHS[2:])])
def test_linear_has_the_bits_of_bf16(storage: Storage, columns: int) -> None:
    packed = torch.from_numpy(draw_codes(np.random.default_rng(columns), 80, columns, storage))
    plain = decoded(packed, columns)
    for rows, phase, tactic in FORMS:
        inputs = {"x": normal(rows, columns), "residual": normal(rows, 80)}
        result, expected = (
            run("Linear", inputs | {"weight": weight}, {"y": normal(rows, 80)},
                None if phase == "prefill" else tactic, phase=phase)["y"]
            for weight in (packed, plain)
        )  # fmt: skip
        np.testing.assert_array_equal(result, expected, err_msg=f"{rows} rows {tactic}")


@needs_compiler
@every_storage
@pytest.mark.parametrize(("columns", "rows"), [(4864, 12), *slow((9056, 3), (9056, 7))])
def test_wide_tokens_have_the_bits_of_bf16(storage: Storage, columns: int, rows: int) -> None:
    """The tokens do not fit into shared memory as fragments."""
    packed = torch.from_numpy(draw_codes(np.random.default_rng(columns), 48, columns, storage))
    inputs, outputs = {"x": normal(rows, columns)}, {"y": normal(rows, 48)}
    result, expected = (
        run("Linear", inputs | {"weight": weight}, outputs, {"many": 0})["y"]
        for weight in (packed, decoded(packed, columns))
    )
    np.testing.assert_array_equal(result, expected)


@needs_compiler
@every_storage
def test_normed_projections_have_the_bits_of_bf16(storage: Storage) -> None:
    columns, width, kv_heads, page = 1504, 32, 1, 16
    packed = torch.from_numpy(draw_codes(np.random.default_rng(7), 160, columns, storage))
    for rows, phase, tactic in FORMS:
        angles = torch.rand(rows, width // 2, generator=torch.Generator().manual_seed(1))
        pools = {f"{name}_pool": normal(2 + rows // page, kv_heads, page, width) for name in "kv"}
        shared = {"x": normal(rows, columns), "norm": normal(columns)}
        places = torch.arange(rows, dtype=torch.int32)
        qkv = {"cos": angles.cos(), "sin": angles.sin(), "positions": places,
               "write_slot": places + page, **pools}  # fmt: skip
        heads = {"q_heads": 3, "kv_heads": kv_heads, "rounding": "llama"}
        outputs = {"q": normal(rows, 3, width), "k_pool_out": pools["k_pool"],
                   "v_pool_out": pools["v_pool"]}  # fmt: skip
        applied_tactic = None if phase == "prefill" else tactic
        for op, weight, inputs, results, attributes in (
            ("RmsQkvRope", "weight", shared | qkv, outputs, heads),
            ("RmsSwiglu", "gate_up", shared, {"h": normal(rows, 80)}, {}),
        ):
            result, expected = (
                run(
                    op,
                    inputs | {weight: form},
                    results,
                    applied_tactic,
                    phase=phase,
                    eps=1e-5,
                    **attributes,
                )
                for form in (packed, decoded(packed, columns))
            )
            for name, values in result.items():
                np.testing.assert_array_equal(values, expected[name], err_msg=f"{op} {name} {rows}")


@needs_compiler
@every_storage
def test_lm_heads_have_the_bits_of_bf16(storage: Storage) -> None:
    columns, vocab = 1504, 112
    packed = torch.from_numpy(draw_codes(np.random.default_rng(9), vocab, columns, storage))
    plain = decoded(packed, columns)
    for rows in (1, 12, 40):
        ids = torch.arange(rows, dtype=torch.int32)
        inputs = {"x": normal(rows, columns), "logit_rows": ids, "norm": normal(columns)}
        result, expected = (
            run("RmsHead", inputs | {"weight": form}, {"logits": torch.zeros(rows, vocab)},
                eps=1e-5, rounding="llama")["logits"]
            for form in (packed, plain)
        )  # fmt: skip
        np.testing.assert_array_equal(result, expected, err_msg=f"{rows} rows")
