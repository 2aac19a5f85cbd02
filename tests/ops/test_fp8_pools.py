"""Pools of e4m3 values in the CUDA kernels, in the emulator: writes, and attention over them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_launches import Geometry, Launch, Text, expected
from attention_requests import plain
from emulation import has_compiler, run_lowering
from launch_branches import Branch, alone, node, reverified, wide_node
from left_out import slow

from specbuild.builder.backends.cuda.tuning.kernel_case import (
    SMALL_TARGET,
    KernelCase,
    bits,
    kernel_case,
    values,
)
from specbuild.plugins_cuda.kv_write.codes import as_codes
from specbuild.plugins_cuda.launches import LoweringRequest, Phase, TensorInfo
from specbuild.plugins_cuda.paged_tree_attention.op import OP as ATTENTION
from specbuild.plugins_cuda.registry import op_named
from specbuild.plugins_cuda.rms_qkv_rope.cases import Heads, project
from specbuild.runtime.errors import SpecbuildError

emulated = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
PROJECTIONS = op_named("RmsQkvRope")
POOLS = ("k_pool", "v_pool")


def with_e4m3_pools(request: LoweringRequest) -> LoweringRequest:
    """Return the request with e4m3 pools."""
    tensors = {
        name: TensorInfo(info.shape, "uint8") if "_pool" in name else info
        for name, info in request.tensors.items()
    }
    return replace(request, tensors=tensors)


def written(drawn: KernelCase, phase: Phase, *, quantized: bool) -> dict[str, np.ndarray]:
    """Return the projections' outputs: bf16 as bits, e4m3 pools as bytes."""
    request = drawn.request(phase, SMALL_TARGET)
    inputs = {name: bits(tensor) for name, tensor in drawn.inputs.items()}
    outputs = {name: bits(tensor) for name, tensor in drawn.outputs.items()}
    # Some values exceed the range of e4m3, and small ones stay below its step.
    weight = drawn.inputs["weight"].float()
    weight[-1] *= 2.0**-9
    weight[-2] *= 2.0**10
    inputs["weight"] = bits(weight.bfloat16())
    if quantized:
        request = with_e4m3_pools(request)
        inputs |= {name: untouched(inputs[name].shape) for name in POOLS}
        outputs |= {f"{name}_out": inputs[name] for name in POOLS}
    assert PROJECTIONS.lower is not None
    return run_lowering(PROJECTIONS, PROJECTIONS.lower(request), inputs, outputs)


def untouched(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 127, shape, np.uint8)


@emulated
@pytest.mark.parametrize(
    ("rows", "phase", "normed"),
    [(5, "decode", False), (5, "decode", True), (40, "decode", False), (40, "decode", True),
     (40, "prefill", False), (40, "prefill", True)],
)  # fmt: skip
def test_pools_store_the_rounded_bf16_keys_and_values(
    rows: int, phase: Phase, normed: bool
) -> None:
    """Normed heads round at the norm only, for either type of pool."""
    heads = Heads(q=4, kv=2, width=32)
    case = project(
        rows, 96, heads, bias=not normed, padding=2,
        rounding="llama" if normed else "gpt_oss", head_norms=normed,
    )  # fmt: skip
    drawn = kernel_case(PROJECTIONS, case)
    wide, result = (written(drawn, phase, quantized=quantized) for quantized in (False, True))
    np.testing.assert_array_equal(result["q"], wide["q"])
    slots = drawn.inputs["write_slot"].numpy()[: rows - 2]
    for name in POOLS:
        shape = wide[f"{name}_out"].shape
        entries = torch.from_numpy(values(wide[f"{name}_out"], torch.bfloat16))
        rounded = by_slot(as_codes(entries).numpy(), slots)
        np.testing.assert_array_equal(by_slot(result[f"{name}_out"], slots), rounded, err_msg=name)
        others = np.setdiff1d(np.arange(shape[2], shape[0] * shape[2]), slots)
        np.testing.assert_array_equal(
            by_slot(result[f"{name}_out"], others), by_slot(untouched(shape), others)
        )
    large = values(wide["v_pool_out"], torch.bfloat16)
    assert np.abs(large).max() > 448


def by_slot(pool: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Return the entries [n, heads, width] in slots of a pool."""
    entries: np.ndarray = pool[slots // pool.shape[2], :, slots % pool.shape[2]]
    return entries


GPT_OSS = Geometry(group=8, width=64, page_size=64)
SHAPES = {
    "8 of 64": GPT_OSS,
    "window": replace(GPT_OSS, window=40, page_size=16),
    "4 of 128": Geometry(group=4, width=128, page_size=64),
    "3 of 32": Geometry(group=3, width=32, page_size=4),
}


@emulated
@pytest.mark.parametrize("name", ["8 of 64", *slow(*list(SHAPES)[1:])])
@pytest.mark.parametrize("position", [160, *slow(2, 64)])
def test_a_token_has_equal_bits_in_every_launch(name: str, position: int) -> None:
    """Compare a token alone, last in a chain, in a tree and in a batch.

    The results are also close to dense attention over the dequantized values.
    """
    shape = SHAPES[name]
    text, other = (Text.drawn(165, shape, seed).coded() for seed in (1, 2))
    reference = Launch(shape, [alone(text, position)]).attended()[0][-1]
    dense = expected(shape, text, position)
    np.testing.assert_allclose(values(reference, torch.bfloat16), dense, atol=1e-2, rtol=2e-2)
    tree = node(text, position, (164, 163, 0, 162))
    trees = [alone(other, 7), tree, node(other, 40, (3, 4, 5, 6)), reverified(other, 33, 2)]
    launches: dict[str, tuple[list[Branch[Text]], int]] = {
        **{f"chain of {n}": ([reverified(text, position, n)], -1) for n in (2, 4, 9)},
        "tree": ([tree], 5),
        "trees": (trees, 5),
        "two words": ([wide_node(text, position)], 4),
    }
    for launch_name, (sequences, row) in launches.items():
        result = Launch(shape, sequences, seed=3).attended()
        sequence = next(i for i, s in enumerate(sequences) if s.text is text)
        np.testing.assert_array_equal(result[sequence][row], reference, err_msg=launch_name)


@emulated
def test_split_per_warp_has_the_bits_of_single_sequences() -> None:
    """Warps with their own splits give each sequence the result that it has alone."""
    shape = Geometry(kv_heads=8, group=2, width=32, page_size=64)
    texts = [Text.drawn(300, shape, seed).coded() for seed in range(8)]
    branches = [reverified(text, 90 + 29 * i, 1 + i % 2) for i, text in enumerate(texts)]
    launch = Launch(shape, branches, pages=130, tactic={"split_teams": 4})
    assert launch.entries() == ["attend_split_per_warp"]
    for i, rows in list(enumerate(launch.attended()))[::3]:
        single = Launch(shape, [alone(texts[i], 90 + 29 * i)], pages=130)
        np.testing.assert_array_equal(rows[-1], single.attended()[0][-1], err_msg=str(i))


@emulated
@pytest.mark.parametrize("name", ["8 of 64", *slow("window", "4 of 128")])
def test_bits_of_a_prompt_row_do_not_depend_on_chunk_boundaries(name: str) -> None:
    shape = SHAPES[name]
    text, other = (Text.drawn(165, shape, seed).coded() for seed in (1, 2))
    whole = Launch(shape, [reverified(text, 150, 151)], phase="prefill").attended()[0]
    parts = [reverified(other, 90, 20), reverified(text, 150, 37)]
    result = Launch(shape, parts, phase="prefill", seed=4).attended()[1]
    np.testing.assert_array_equal(result, whole[-37:])
    for position in (0, 66, 150):
        dense = expected(shape, text, position)
        row = values(whole[position], torch.bfloat16)
        np.testing.assert_allclose(row, dense, atol=1e-2, rtol=2e-2)


@pytest.mark.parametrize("width", [16, 80])
def test_rejects_head_widths_that_e4m3_kernels_do_not_support(width: int) -> None:
    with pytest.raises(SpecbuildError, match=r"equal widths of .* for a cache in fp8"):
        ATTENTION.lower(with_e4m3_pools(plain(width=width)))  # type: ignore[misc]


def test_rejects_pools_of_two_types() -> None:
    request = plain()
    pool = TensorInfo(request.tensors["k_pool"].shape, "uint8")
    mixed = replace(request, tensors={**request.tensors, "k_pool": pool})
    with pytest.raises(SpecbuildError, match="bfloat16, uint8, bfloat16"):
        ATTENTION.lower(mixed)  # type: ignore[misc]
