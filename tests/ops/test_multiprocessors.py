"""Which multiprocessors launches take, and what they leave to the launches around them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.plugins_cuda.launches import (
    RESERVED_BYTES,
    LoweringRequest,
    OpLaunch,
    Target,
    TensorInfo,
)
from specbuild.plugins_cuda.linear.storage import BF16, MXFP4, Storage
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.executors.cuda.gpu import shared_carveout

HOPPER = Target()


@given(block=st.integers(16, 512).map(lambda kib: kib << 10), wanted=st.integers(0, 512 << 10))
def test_a_cta_is_alone_where_two_do_not_fit(block: int, wanted: int) -> None:
    target = Target(shared_bytes_per_block=block)
    alone = target.shared_bytes_alone
    # A multiprocessor has what one CTA may have, and what the hardware takes for that one.
    assert 2 * (alone + RESERVED_BYTES) > block + RESERVED_BYTES
    assert not target.two_fit(alone) and target.two_fit(alone - 256)
    assert alone % 256 == 0 and alone <= block
    assert target.two_fit(wanted) == (wanted + RESERVED_BYTES <= (block + RESERVED_BYTES) // 2)


def projection(rows: int, storage: Storage, target: Target = HOPPER) -> OpLaunch:
    """O of GPT-OSS: 2880 outputs of 4096."""
    packed = {
        BF16: TensorInfo((180, 128, 512), "bfloat16"),
        MXFP4: TensorInfo((180, 64, 544), "uint8"),
    }
    tensors = {
        "x": TensorInfo((rows, 4096), "bfloat16"),
        "weight": packed[storage],
        "y": TensorInfo((rows, 2880), "bfloat16"),
    }
    op = op_named("Linear")
    assert op.lower is not None
    return op.lower(LoweringRequest(tensors, {}, "decode", target)).launches[-1]


def qkv(rows: int) -> OpLaunch:
    """QKV of GPT-OSS: 5120 outputs of 2880."""
    tensors = {
        "x": TensorInfo((rows, 2880), "bfloat16"),
        "norm": TensorInfo((2880,), "bfloat16"),
        "weight": TensorInfo((320, 90, 512), "bfloat16"),
        "bias": TensorInfo((5120,), "bfloat16"),
        "cos": TensorInfo((2048, 32), "float32"),
        "sin": TensorInfo((2048, 32), "float32"),
        "positions": TensorInfo((rows,), "int32"),
        "write_slot": TensorInfo((rows,), "int32"),
        "k_pool": TensorInfo((33, 8, 64, 64), "bfloat16"),
        "v_pool": TensorInfo((33, 8, 64, 64), "bfloat16"),
        "q": TensorInfo((rows, 64, 64), "bfloat16"),
        "k_pool_out": TensorInfo((33, 8, 64, 64), "bfloat16"),
        "v_pool_out": TensorInfo((33, 8, 64, 64), "bfloat16"),
    }
    op = op_named("RmsQkvRope")
    assert op.lower is not None
    attributes = {"eps": 1e-5, "rounding": "gpt_oss", "q_heads": 64}
    return op.lower(LoweringRequest(tensors, attributes, "decode", HOPPER)).launches[-1]


@pytest.mark.parametrize(("multiprocessors", "taken"), [(132, 128), (114, 111), (32, 32), (3, 3)])
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_few_rows_leave_multiprocessors_to_small_launches(
    rows: int, multiprocessors: int, taken: int
) -> None:
    target = Target(multiprocessors=multiprocessors)
    assert projection(rows, BF16, target).grid[0] == taken


def test_so_does_qkv() -> None:
    assert qkv(8).grid[0] == 128 and qkv(9).grid[0] == 132


def test_others_take_every_multiprocessor() -> None:
    assert projection(9, BF16).grid[0] == 132
    assert projection(1, MXFP4).grid[0] == 132


def attention(sequences: int, rows: int, *, held: int = 0) -> OpLaunch:
    """Full attention of GPT-OSS, ``rows`` a sequence; with lists of ``held`` tokens if any."""
    total = sequences * rows
    tensors = {
        "q": TensorInfo((total, 64, 64), "bfloat16"),
        "k_pool": TensorInfo((1024, 8, 64, 64), "bfloat16"),
        "v_pool": TensorInfo((1024, 8, 64, 64), "bfloat16"),
        "page_table": TensorInfo((sequences, 1, 512), "int32"),
        "row_start": TensorInfo((sequences + 1,), "int32"),
        "row_slot": TensorInfo((total,), "int32"),
        "tree_start": TensorInfo((sequences,), "int32"),
        "ancestor_bits": TensorInfo((total, 1), "int32"),
        "sinks": TensorInfo((64,), "float32"),
        "attended": TensorInfo((total, 64, 64), "bfloat16"),
    }
    if held:
        tensors["selected"] = TensorInfo((total, 1, held), "int32")
    op = op_named("PagedTreeAttention")
    assert op.lower is not None
    attributes = {"scale": 0.125, "window": 0}
    request = LoweringRequest(tensors, attributes, "decode", HOPPER, {"slot_teams": 0})
    return op.lower(request).launches[-1]


@pytest.mark.parametrize(
    ("sequences", "rows", "held", "ctas"),
    [
        (1, 1, 0, 128), (1, 4, 0, 128), (2, 1, 0, 256), (2, 4, 0, 256),
        (1, 1, 2048, 128), (1, 4, 2048, 256), (2, 1, 2048, 256), (2, 4, 2048, 256),
    ],
)  # fmt: skip
def test_ctas_of_attention_have_a_multiprocessor_each_where_they_can(
    sequences: int, rows: int, held: int, ctas: int
) -> None:
    """Two on one would leave another without work; where there are more, two share it."""
    launch = attention(sequences, rows, held=held)
    needed = int(dict(launch.kernel.constants)["SHARED_BYTES"])
    assert launch.grid[0] * launch.grid[1] * launch.grid[2] == ctas
    if ctas <= HOPPER.multiprocessors:
        assert not HOPPER.two_fit(launch.shared_bytes)
    else:
        assert launch.shared_bytes == needed


@pytest.mark.parametrize(
    ("shared_bytes", "registers", "threads", "carveout"),
    [
        (65537, 32, 64, 100),  # stages its weights
        (65536, 126, 512, 0),  # has all registers of an SM
        (52480, 65, 512, 0),  # 72 are taken: 36864 of 65536
        (65536, 64, 512, -1),  # two fit
        (0, 128, 480, 0),
        (0, 40, 1024, 0),
        (0, 18, 256, -1),
    ],
)
def test_how_a_multiprocessor_divides_its_memory(
    shared_bytes: int, registers: int, threads: int, carveout: int
) -> None:
    assert shared_carveout(shared_bytes, registers, threads) == carveout
