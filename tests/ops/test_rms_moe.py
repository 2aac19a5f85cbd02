"""RmsMoe: the packed layout of its weights, its reference, and the kernels' batch invariance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from emulation import has_compiler, run_lowering
from geometries import GPT_OSS_20B, gpt_oss_parts
from hypothesis import given, settings
from hypothesis import strategies as st
from left_out import slow

from specbuild.builder.backends.cuda.tuning.inputs import LaunchData
from specbuild.builder.backends.cuda.tuning.kernel_case import SMALL_TARGET, bits, values
from specbuild.builder.families.gpt_oss.model import MoeBlock, RmsNorm
from specbuild.plugins_cuda.cases import Arrays
from specbuild.plugins_cuda.launches import (
    LoweringRequest,
    Tactic,
    Target,
    TensorInfo,
)
from specbuild.plugins_cuda.moe.expert_weight import expert_weight
from specbuild.plugins_cuda.rms_moe.cases import DEEPSEEK_V3, Layer
from specbuild.plugins_cuda.rms_moe.lowering import lower
from specbuild.plugins_cuda.rms_moe.op import OP, reference, router_input
from specbuild.plugins_cuda.rms_moe.packing import (
    down_steps,
    gate_up_steps,
    pack_down,
    pack_down_values,
    pack_gate_up,
    pack_gate_up_bias,
    pack_gate_up_values,
    tile_bytes,
    unpack_down,
    unpack_down_values,
    unpack_gate_up,
    unpack_gate_up_bias,
    unpack_gate_up_values,
)
from specbuild.runtime.errors import SpecbuildError

V3 = replace(DEEPSEEK_V3, hidden=64, inner=32, experts=64, top_k=3)
emulated = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
NAMES = {
    torch.bfloat16: "bfloat16", torch.float32: "float32", torch.int32: "int32",
    torch.uint8: "uint8",
}  # fmt: skip


def mxfp4(seed: int, experts: int, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (experts, rows, width)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(1, 129, shape, generator=generator, dtype=torch.uint8)
    return blocks, scales


# -- packing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [32, 96, 128])
def test_packed_bf16_weights_can_be_unpacked(width: int) -> None:
    """A lane's values of mma row g are also contiguous, with gates in rows 0 to 7."""
    weight = torch.randn(2, width, 48, generator=torch.Generator().manual_seed(width)).bfloat16()
    packed = pack_gate_up_values(weight)
    assert packed.shape == (2, 3, width // 32 * 512)
    assert torch.equal(unpack_gate_up_values(packed), weight)
    # Expert 1, tile 2, step 0: row g = 3 of its gates and ups, columns 8t of t = 1.
    tile = packed[1, 2].view(-1, 2, 32, 8)
    for half in (0, 1):
        assert torch.equal(tile[0, half, 4 * 3 + 1], weight[1, 8:16, 2 * (2 * 8 + 3) + half])
    packed = pack_down_values(weight)
    assert packed.shape == (2, 6, -(-width // 64) * 512)
    assert torch.equal(unpack_down_values(packed, width), weight)
    # Row 5 of tile 4 at the even block of step 0, columns 16 to 23.
    tile = packed[1, 4].view(-1, 2, 32, 8)
    assert torch.equal(tile[0, 0, 4 * 5 + 2], weight[1, 16:24, 8 * 4 + 5])


def test_tune_draws_bf16_weights_in_the_packed_layout() -> None:
    infos = {
        "x": TensorInfo((2, 96), "bfloat16"),
        "gate_up": TensorInfo((3, 8, 16 * 96), "bfloat16"),
        "gate_up_bias": TensorInfo((3, 128), "bfloat16"),
        "down": TensorInfo((3, 12, 512), "bfloat16"),
    }
    request = LoweringRequest(infos, OP.complete(Layer().attributes()))
    drawn = LaunchData(request, 64, np.random.default_rng(3)).arrays(["gate_up", "down"])
    gate_up, down = (values(drawn[name], torch.bfloat16) for name in ("gate_up", "down"))
    assert 0.8 < unpack_gate_up_values(torch.from_numpy(gate_up)).std() * 96**0.5 < 1.2
    assert unpack_down_values(torch.from_numpy(down), 64).shape == (3, 64, 96)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 33), st.integers(0, 1000))
def test_packed_mxfp4_weights_can_be_unpacked(
    experts: int, tiles: int, width: int, seed: int
) -> None:
    blocks, scales = mxfp4(seed, experts, 16 * tiles, width)
    packed = pack_gate_up(blocks, scales)
    assert packed.shape == (experts, tiles, tile_bytes(gate_up_steps(32 * width)))
    for restored, original in zip(unpack_gate_up(packed), (blocks, scales), strict=True):
        assert torch.equal(restored, original)
    packed = pack_down(blocks, scales)
    assert packed.shape == (experts, 2 * tiles, tile_bytes(down_steps(32 * width)))
    for restored, original in zip(unpack_down(packed, 32 * width), (blocks, scales), strict=True):
        assert torch.equal(restored, original)


def test_biases_are_packed_by_tiles() -> None:
    bias = torch.arange(64).view(2, 32)
    packed = pack_gate_up_bias(bias)
    assert packed[0, :16].tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    assert torch.equal(unpack_gate_up_bias(packed), bias)


def decoded_tile(tile: np.ndarray, steps: int) -> np.ndarray:
    """Return the 16 mma rows of a packed tile [16, 32·steps], by the header's layout."""
    out = np.empty((16, 32 * steps))
    for step in range(steps):
        stage, place = divmod(step, 15)
        start = 4096 * stage
        scales = tile[start : start + 256].reshape(16, 16)
        words = tile[start + 256 * (1 + place) : start + 256 * (2 + place)].view(np.uint32)
        for lane in range(32):
            for half in range(2):
                word = int(words[2 * lane + half])
                row = lane // 4 + 8 * half
                pairs = [
                    word & 0x81C081C0,
                    word << 6 & 0x81C081C0,
                    (word >> 4 | word << 28) & 0x81C081C0,
                    (word << 2 & 0x80C080C0) | (word >> 6 & 0x01000100),
                ]
                bf16 = np.array([p >> 16 * i & 0xFFFF for p in pairs for i in range(2)], np.uint32)
                values = (bf16 << 16).view(np.float32).astype(float)
                column = 32 * step + 8 * (lane % 4)
                factor = 2.0 ** (int(scales[row, place]) - 1)
                out[row, column : column + 8] = values * factor
    return out


@pytest.mark.parametrize("width", [2, 16, 18])
def test_packed_values_are_where_the_kernels_read_them(width: int) -> None:
    blocks, scales = mxfp4(5, 1, 32, width)
    expected = expert_weight(blocks, scales)[0].T.double().numpy()
    gate_up = pack_gate_up(blocks, scales)[0].numpy()
    for j in range(2):
        tile = decoded_tile(gate_up[j], width)
        np.testing.assert_array_equal(tile[:8], expected[16 * j : 16 * j + 16 : 2])
        np.testing.assert_array_equal(tile[8:], expected[16 * j + 1 : 16 * j + 16 : 2])
    down = pack_down(blocks, scales)[0].numpy()
    for j in range(4):
        tile = decoded_tile(down[j], width // 2).reshape(2, 8, width // 2, 32)
        rows = expected[8 * j : 8 * j + 8].reshape(8, width // 2, 2, 32)
        np.testing.assert_array_equal(tile[0], rows[:, :, 0])
        np.testing.assert_array_equal(tile[1], rows[:, :, 1])


def test_rejects_weights_of_unsupported_sizes() -> None:
    blocks, scales = mxfp4(0, 1, 16, 2)
    with pytest.raises(SpecbuildError, match=r"scale of 2\^2, expected at most 2\^1"):
        pack_gate_up(blocks, torch.full_like(scales, 129))
    with pytest.raises(SpecbuildError, match="8 rows, expected a multiple of 16"):
        pack_gate_up(blocks[:, :8], scales[:, :8])
    with pytest.raises(SpecbuildError, match=r"scales \(1, 16, 1\)"):
        pack_down(blocks, scales[..., :1])


# -- reference ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_equals_the_block_of_the_model(dtype: torch.dtype) -> None:
    """Compare with the modules of the portable graph, on the unpacked weights."""
    layer = Layer(rows=6, hidden=96, inner=64, experts=8, top_k=4)
    x, norm, router, router_bias, gate_up, b1, down, b2, row_start = (
        torch.from_numpy(array) for array in layer.arrays(np.random.default_rng(1))[:9]
    )  # fmt: skip
    experts = gpt_oss_parts(1, experts=8, top_k=4, inner=64)
    geometry = replace(GPT_OSS_20B, hidden=96, **experts)
    block, rms = MoeBlock(geometry).to(dtype), RmsNorm(96, 1e-5).to(dtype)
    gate_up_blocks, gate_up_scales = unpack_gate_up(gate_up)
    down_blocks, down_scales = unpack_down(down, 64)
    rms.load_state_dict({"weight": norm})
    block.load_state_dict({
        "router.weight": router, "router.bias": router_bias,
        "experts.gate_up_proj_blocks": gate_up_blocks,
        "experts.gate_up_proj_scales": gate_up_scales,
        "experts.gate_up_proj_bias": unpack_gate_up_bias(b1),
        "experts.down_proj_blocks": down_blocks, "experts.down_proj_scales": down_scales,
        "experts.down_proj_bias": b2,
    })  # fmt: skip
    x = x.to(dtype)
    with torch.no_grad():
        expected = x + block(rms(x))
    weights = (t.to(dtype) for t in (norm, router, router_bias))
    result = reference(
        x, *weights, gate_up, b1.to(dtype), down, b2.to(dtype), row_start,
        **OP.complete(layer.attributes()),
    )  # fmt: skip
    torch.testing.assert_close(
        result, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=0.0
    )


# -- kernels in the emulator --------------------------------------------------------------------


def inputs_of(arrays: Arrays) -> dict[str, torch.Tensor]:
    tensors = {}
    for spec, array in zip(OP.inputs, arrays, strict=True):
        if array is not None:
            tensor = torch.from_numpy(array)
            narrow = tensor.dtype == torch.float32 and spec.dtype != "float32"
            tensors[spec.name] = tensor.bfloat16() if narrow else tensor
    return tensors


def request_of(
    inputs: dict[str, torch.Tensor], layer: Layer, target: Target, tactic: Tactic | None = None
) -> LoweringRequest:
    tensors = {name: TensorInfo(tuple(t.shape), NAMES[t.dtype]) for name, t in inputs.items()}
    tensors["y"] = tensors["x"]
    return LoweringRequest(
        tensors, OP.complete(layer.attributes()), target=target, tactic=tactic or {}
    )


def emulated_y(
    inputs: dict[str, torch.Tensor],
    layer: Layer,
    tactic: Tactic | None = None,
    target: Target = SMALL_TARGET,
    slices: int = 1,
) -> np.ndarray:
    """Return the bits of y."""
    lowering = lower(request_of(inputs, layer, target, tactic), slices=slices)
    arrays = {name: bits(tensor) for name, tensor in inputs.items()}
    return run_lowering(OP, lowering, arrays, {"y": bits(inputs["x"])})["y"]


def row_of(inputs: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """Return the inputs of the layer for one row."""
    row_start = torch.tensor([0, 1], dtype=torch.int32)
    return {**inputs, "x": inputs["x"][row : row + 1], "row_start": row_start}


@emulated
@pytest.mark.parametrize(
    ("layer", "alone"),
    [
        (Layer(rows=21, popular=True, hidden=512, inner=96, top_k=3), (0, 20)),
        # The activations of one row fit into shared memory; those of all rows do not.
        (Layer(rows=100, hidden=1056, top_k=2), (0, 99)),
        (Layer(rows=41, inner=1056, top_k=4), (7, 40)),
        (Layer(rows=21, popular=True, hidden=544, inner=96, top_k=3, bf16=True), (0, 20)),
        (replace(V3, rows=35), (0, 34)),
        (replace(V3, rows=10, hidden=7168, experts=4, groups=1, groups_chosen=1), (0, 9)),
    ],
    ids=["one expert's passes", "gathered x", "gathered h", "bf16", "DeepSeek-V3", "7168 values"],
)
def test_a_row_does_not_depend_on_the_others(layer: Layer, alone: tuple[int, ...]) -> None:
    inputs = inputs_of(layer.arrays(np.random.default_rng(2)))
    together = emulated_y(inputs, layer)
    for row in alone:
        single = emulated_y(row_of(inputs, row), layer)
        np.testing.assert_array_equal(single[0], together[row])


def tactic(*, tiles: int, warps: int, pass_rows: int, stages: int = 2, pieces: int = 1) -> Tactic:
    """Return the tactic for gate/up and down, with separate numbers of warps."""
    same = {"stages": stages, "pieces": pieces, "pass_rows": pass_rows, "tiles": tiles}
    of_down = {f"down_{name}": value for name, value in same.items()}
    return {**same, **of_down, "warps": warps, "down_warps": warps + 1}


@emulated
@pytest.mark.parametrize("bf16", [True, *slow(False)], ids=["bf16", "mxfp4"])
def test_tactics_and_targets_give_the_same_bits(bf16: bool) -> None:
    """Down has an odd number of blocks, rows need two words, and experts several passes."""
    layer = Layer(rows=34, live=33, hidden=704, inner=96, experts=4, top_k=2, bf16=bf16)
    inputs = inputs_of(layer.arrays(np.random.default_rng(3)))
    expected = emulated_y(inputs, layer, tactic(tiles=1, warps=12, pass_rows=8))[:33]
    others = (
        tactic(tiles=2, warps=8, pass_rows=16),
        {**tactic(tiles=2, warps=5, pass_rows=8, stages=3), "down_pass_rows": 16, "down_tiles": 1},
        tactic(tiles=1, warps=3, pass_rows=16, stages=1, pieces=2 if bf16 else 3),
        tactic(tiles=2, warps=2, pass_rows=8, stages=2, pieces=4 if bf16 else 5),
    )
    for other in others:
        np.testing.assert_array_equal(emulated_y(inputs, layer, other)[:33], expected, str(other))
    # With so little shared memory, down gathers its rows.
    small = Target(multiprocessors=7, shared_bytes_per_block=90 * 1024)
    result = emulated_y(inputs, layer, tactic(tiles=2, warps=4, pass_rows=8), small)
    np.testing.assert_array_equal(result[:33], expected)


@emulated
@pytest.mark.parametrize(
    ("slices", "hidden", "bf16"),
    [(2, 544, False), (2, 288, True), (4, 1856, False), (4, 416, True)],
)
def test_with_slices_of_k_a_row_has_the_same_bits_alone(
    slices: int, hidden: int, bf16: bool
) -> None:
    """Slices end within a stage; use all tactics, other rows, and gathered rows."""
    layer = Layer(
        rows=21, live=20, hidden=hidden, inner=32, experts=4, top_k=2, popular=True, bf16=bf16
    )
    inputs = inputs_of(layer.arrays(np.random.default_rng(7)))
    together = emulated_y(inputs, layer, slices=slices)[:20]
    expected = values(together, torch.bfloat16)
    whole = OP.reference(*(inputs.get(spec.name) for spec in OP.inputs), **layer.attributes())
    np.testing.assert_allclose(expected, whole[:20].float().numpy(), atol=0.06, rtol=0.02)
    others = (
        tactic(tiles=2, warps=8, pass_rows=16),
        tactic(tiles=1, warps=12, pass_rows=8, stages=1, pieces=2 if bf16 else 3),
    )
    for other in others:
        result = emulated_y(inputs, layer, other, slices=slices)[:20]
        np.testing.assert_array_equal(result, together, str(other))
    for row in (0, 19):
        single = emulated_y(row_of(inputs, row), layer, slices=slices)
        np.testing.assert_array_equal(single[0], together[row])


@emulated
def test_a_row_of_nan_changes_no_other_row() -> None:
    layer = Layer(rows=3)
    inputs = inputs_of(layer.arrays(np.random.default_rng(4)))
    clean = emulated_y(inputs, layer)
    inputs["x"][1] = torch.nan
    harmed = emulated_y(inputs, layer)
    np.testing.assert_array_equal(harmed[[0, 2]], clean[[0, 2]])


@emulated
def test_equal_logits_select_the_lower_expert() -> None:
    """Experts 0 and 1 tie for the last place; only expert 0 may be selected."""
    layer = Layer(rows=2, experts=4, top_k=2)
    inputs = inputs_of(layer.arrays(np.random.default_rng(5)))
    inputs["router_weight"][:] = 0
    inputs["router_bias"][:] = torch.tensor([1.0, 1.0, -3.0, 2.0])
    before = emulated_y(inputs, layer)
    inputs["down_bias"][1] += 1000
    np.testing.assert_array_equal(emulated_y(inputs, layer), before)
    inputs["down_bias"][0] += 1000
    assert (emulated_y(inputs, layer) != before).all()


def test_router_logits_are_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    x, norm = torch.randn(3, 64, generator=generator).bfloat16(), torch.ones(64).bfloat16()
    weight = torch.randn(4, 64, generator=generator).bfloat16()
    bias = torch.randn(4, generator=generator).bfloat16()
    normed, logits = router_input(x, norm, (weight, bias), 1e-5)
    exact = normed.double() @ weight.double().T + bias.double()
    assert logits.dtype == torch.float32
    assert torch.equal(logits, logits.bfloat16().float())
    assert ((logits - exact).abs() <= exact.abs() * 2**-8).all()
