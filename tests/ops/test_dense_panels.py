"""Launches of dense kernels: which are used by default, and panels of uneven depths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulation import has_compiler, run_lowering

from specbuild.builder.backends.cuda.tuning.kernel_case import bits
from specbuild.plugins_cuda.launches import LoweringRequest, Tactic, Target, TensorInfo
from specbuild.plugins_cuda.linear.slices import slices_of
from specbuild.plugins_cuda.linear.storage import BF16, FP8, MXFP4, Q4_K, Q8, Storage
from specbuild.plugins_cuda.registry import op_named

# 59 blocks: 15 slices of four blocks in three groups; the last slice has three.
COLUMNS = 1888
TARGET = Target(multiprocessors=3)


def test_many_rows_use_panels_by_default() -> None:
    """A panel has two blocks, so panels are not used for an odd number of blocks a slice."""
    op = op_named("Linear")
    lower, none = op.lower, op.complete({})
    assert lower is not None

    def is_panels(rows: int, columns: int, tactic: Tactic) -> bool:
        weight = TensorInfo((9, columns // 32, 512), "bfloat16")
        x = TensorInfo((rows, columns), "bfloat16")
        request = LoweringRequest({"x": x, "weight": weight}, none, "decode", TARGET, tactic)
        return dict(lower(request).launches[-1].kernel.constants).get("PANELS", 0) == 1

    assert [is_panels(rows, COLUMNS, {}) for rows in (16, 17, 64, 65, 256)] == [False, *[True] * 4]
    assert is_panels(20, COLUMNS, {"panels": 1})
    assert not is_panels(40, COLUMNS, {"panels": 0})
    odd = 11 * 3 * 32
    assert slices_of(odd // 32) == 11
    assert not is_panels(40, odd, {})


def test_units_are_full_tiles_if_balanced() -> None:
    """Of quantized weights, which a CTA dequantizes in full tiles, and of CTAs with many tiles."""

    def units(tiles: int, dtype: str, last: int) -> object:
        weight, x = TensorInfo((tiles, 4, last), dtype), TensorInfo((1, 256), "bfloat16")
        if dtype == "bfloat16":
            weight = TensorInfo((tiles, 8, last), dtype)
        op = op_named("Linear")
        assert op.lower is not None
        arrays = {"x": x, "weight": weight}
        request = LoweringRequest(arrays, op.complete({}), "decode", Target(), {})
        return dict(op.lower(request).launches[0].kernel.constants)["UNIT_PAIRS"]

    assert [units(tiles, "uint8", 544) for tiles in (256, 384, 180, 320)] == [8, 8, 4, 4]
    assert [units(tiles, "bfloat16", 512) for tiles in (256, 1056, 540)] == [4, 8, 4]


@pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
def test_a_depth_that_does_not_divide_the_blocks_of_a_group_changes_no_bit() -> None:
    """A group of 20 blocks is multiplied in steps of 8, which are unrolled."""
    op, columns, rows, outputs = op_named("Linear"), 640, 20, 96
    generator = torch.Generator().manual_seed(0)
    arrays = {
        "weight": torch.randn(outputs // 16, columns // 32, 512, generator=generator) * 0.04,
        "x": torch.randn(rows, columns, generator=generator),
    }
    inputs = {name: bits(array.bfloat16()) for name, array in arrays.items()}
    tensors = {name: TensorInfo(tuple(a.shape), "bfloat16") for name, a in arrays.items()}
    results: list[np.ndarray] = []
    for tactic in ({"many": 1, "panels": 1, "loads": 16}, {"many": 0}):
        assert op.lower is not None
        lowering = op.lower(LoweringRequest(tensors, op.complete({}), "decode", TARGET, tactic))
        constants = dict(lowering.launches[-1].kernel.constants)
        if tactic["many"]:
            group = int(constants["GROUP_SLICES"]) * int(constants["SLICE_BLOCKS"])
            assert columns // 32 % group == 0 and group % int(constants["DEPTH"]) != 0
        blank = {"y": np.zeros((rows, outputs), np.uint16)}
        results.append(run_lowering(op, lowering, inputs, blank)["y"])
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("storage", [BF16, MXFP4, FP8, Q8, Q4_K], ids=lambda storage: storage.name)
def test_every_width_has_a_launch_for_many_rows(storage: Storage) -> None:
    """A CTA of a quantized weight and 64 tokens has 12 warps, so a group has at most 12 slices."""
    op = op_named("Linear")
    assert op.lower is not None
    for blocks in range(storage.unit_blocks * 2, 200, storage.unit_blocks):
        columns, units = 32 * blocks, storage.units(blocks)
        weight = TensorInfo((8, units, storage.elements), storage.dtype)
        for rows in (20, 64):
            arrays = {"x": TensorInfo((rows, columns), "bfloat16"), "weight": weight}
            request = LoweringRequest(arrays, op.complete({}), "decode", Target(), {"panels": 0})
            assert all(launch.block > 0 for launch in op.lower(request).launches)
