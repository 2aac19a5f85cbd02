"""Experts as quantized values: the bits of the same experts in bf16, in decoding and prompts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from emulation import has_compiler
from left_out import slow
from test_dense_invariance import normal, run

from specbuild.plugins_cuda.linear.cases import draw_groups
from specbuild.plugins_cuda.linear.codec import GroupedCodes
from specbuild.plugins_cuda.linear.group_codes import GROUP_STORAGES, decoded_codes, pack_codes
from specbuild.plugins_cuda.linear.packing import unpack_rows
from specbuild.plugins_cuda.linear.storage import (
    FP8_BLOCK,
    INT4,
    K_MIXED,
    MIXED,
    Q4_K,
    Q6_K,
    Q8,
    Storage,
)
from specbuild.plugins_cuda.rms_moe.cases import Layer, draw_experts
from specbuild.plugins_cuda.rms_moe.expert_codes import (
    decoded_experts,
    pack_down_codes,
    pack_gate_up_codes,
)
from specbuild.plugins_cuda.rms_moe.packing import (
    down_steps,
    gate_up_steps,
    unpack_down_values,
    unpack_gate_up_values,
)

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
QUICK = (Q4_K, Q6_K, Q8, INT4, FP8_BLOCK)
some_storages = pytest.mark.parametrize(
    "storage", [*QUICK, *slow(*(s for s in GROUP_STORAGES if s not in QUICK))], ids=lambda s: s.name
)
LAYER = Layer(hidden=544, inner=352, experts=5, top_k=2, rounding="llama", activation="swiglu")


def rows_of(weight: GroupedCodes, storage: Storage) -> torch.Tensor:
    """Return the bf16 values of a weight, as a dense layer packs and dequantizes it."""
    columns = weight.codes.shape[1]
    return unpack_rows(decoded_codes(pack_codes(weight, storage), columns, storage))


@pytest.mark.parametrize("storage", GROUP_STORAGES, ids=lambda s: s.name)
@pytest.mark.parametrize("inner", [256, 352])
def test_packed_experts_equal_dense_weights(storage: Storage, inner: int) -> None:
    """Cover a last unit that is not full, and groups of 64 columns that are halves of rows."""
    rng, hidden = np.random.default_rng(inner), 288
    gate, up = (draw_groups(rng, inner, hidden, storage) for _ in range(2))
    packed = pack_gate_up_codes(gate, up, storage)[None]
    values = decoded_experts(packed, inner // 8, gate_up_steps(hidden), storage)
    unpacked = unpack_gate_up_values(values)[0].T.unflatten(0, (-1, 2))
    for place, weight in enumerate((gate, up)):
        assert torch.equal(unpacked[:, place], rows_of(weight, storage))

    down = draw_groups(rng, hidden, inner, storage)
    if 64 in {part.columns for part in down.parts.values()}:
        # A unit of this form stores 128 columns.
        parts = {
            name: replace(part, numbers=part.numbers[:, torch.arange(-(-inner // 64)) // 2 * 2])
            for name, part in down.parts.items()
            if part.columns == 64
        }
        down = GroupedCodes(down.codes, {**down.parts, **parts})
    values = decoded_experts(
        pack_down_codes(down, storage)[None], hidden // 8, down_steps(inner), storage
    )
    assert torch.equal(unpack_down_values(values, inner)[0].T, rows_of(down, storage))


@pytest.mark.parametrize("storage", [MIXED, K_MIXED], ids=lambda s: s.name)
def test_gate_and_up_may_have_values_with_and_without_sign(storage: Storage) -> None:
    """As Q6_K beside Q4_K: the values of one are int8, those of the other uint8."""
    gate, up = (draw_groups(np.random.default_rng(3), 32, 128, storage) for _ in range(2))
    gate = replace(gate, codes=gate.codes.to(torch.int8))
    up = replace(up, codes=up.codes.abs().clamp_max(15).to(torch.uint8))
    packed = pack_gate_up_codes(gate, up, storage)[None]
    values = decoded_experts(packed, 32 // 8, gate_up_steps(128), storage)
    unpacked = unpack_gate_up_values(values)[0].T.unflatten(0, (-1, 2))
    assert torch.equal(unpacked[:, 0], rows_of(gate, storage))
    assert torch.equal(unpacked[:, 1], rows_of(up, storage))


@needs_compiler
@some_storages
@pytest.mark.parametrize(
    ("rows", "phase"),
    [(1, "decode"), (40, "decode"), (70, "prefill"),
     *slow((4, "decode"), (9, "decode"), (64, "decode"), (300, "prefill"))],
)  # fmt: skip
def test_quantized_experts_have_the_bits_of_bf16(storage: Storage, rows: int, phase: str) -> None:
    layer = replace(LAYER, rows=rows, popular=rows > 8)
    rng = np.random.default_rng(rows)
    x, norm, router, router_bias, _, gate_up_bias, _, down_bias, row_start = (
        torch.from_numpy(array) for array in layer.arrays(rng)[:9]
    )  # fmt: skip
    sizes = {"gate_up": (layer.inner // 8, gate_up_steps(layer.hidden)),
             "down": (layer.hidden // 8, down_steps(layer.inner))}  # fmt: skip
    packed = {
        name: torch.from_numpy(draw_experts(rng, layer.experts, *of, storage))
        for name, of in sizes.items()
    }
    plain = {name: decoded_experts(packed[name], *of, storage) for name, of in sizes.items()}
    shared = {
        "x": x.bfloat16(), "norm": norm.bfloat16(), "router_weight": router.bfloat16(),
        "router_bias": router_bias.bfloat16(), "gate_up_bias": gate_up_bias.bfloat16(),
        "down_bias": down_bias.bfloat16(), "row_start": row_start,
    }  # fmt: skip
    result, expected = (
        run("RmsMoe", shared | weights, {"y": normal(rows, layer.hidden)}, phase=phase,
            **layer.attributes())["y"]
        for weights in (packed, plain)
    )  # fmt: skip
    np.testing.assert_array_equal(result, expected)
    assert np.unique(result).size > 100
