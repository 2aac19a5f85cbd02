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


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_few_rows_leave_multiprocessors_to_the_router(rows: int) -> None:
    assert projection(rows, BF16).grid[0] == 128


def test_others_take_every_multiprocessor() -> None:
    assert projection(9, BF16).grid[0] == 132
    assert projection(1, MXFP4).grid[0] == 132
    assert projection(1, BF16, Target(multiprocessors=3)).grid[0] == 3


@pytest.mark.parametrize(("sequences", "has_one_each"), [(1, True), (2, False)])
def test_ctas_of_attention_have_a_multiprocessor_each_where_they_can(
    sequences: int, has_one_each: bool
) -> None:
    """Two on one would leave another without work."""
    tensors = {
        "q": TensorInfo((sequences, 64, 64), "bfloat16"),
        "k_pool": TensorInfo((1024, 8, 64, 64), "bfloat16"),
        "v_pool": TensorInfo((1024, 8, 64, 64), "bfloat16"),
        "page_table": TensorInfo((sequences, 1, 512), "int32"),
        "row_start": TensorInfo((sequences + 1,), "int32"),
        "row_slot": TensorInfo((sequences,), "int32"),
        "tree_start": TensorInfo((sequences,), "int32"),
        "ancestor_bits": TensorInfo((sequences, 1), "int32"),
        "sinks": TensorInfo((64,), "float32"),
        "attended": TensorInfo((sequences, 64, 64), "bfloat16"),
    }
    op = op_named("PagedTreeAttention")
    assert op.lower is not None
    request = LoweringRequest(
        tensors, {"scale": 0.125, "window": 0}, "decode", HOPPER, {"slot_teams": 0}
    )
    [lowered] = op.lower(request).launches
    ctas = lowered.grid[0] * lowered.grid[1] * lowered.grid[2]
    assert (ctas <= HOPPER.multiprocessors) == has_one_each
    assert HOPPER.two_fit(lowered.shared_bytes) != has_one_each
