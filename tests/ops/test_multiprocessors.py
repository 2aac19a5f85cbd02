"""The number of multiprocessors of a launch, and how many it leaves to concurrent launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpt_oss_requests import attention, experts_request, projection, qkv
from hypothesis import given
from hypothesis import strategies as st

from specbuild.plugins_cuda.launches import (
    RESERVED_BYTES,
    LoweringRequest,
    OpLaunch,
    Target,
    TensorInfo,
)
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.executors.cuda.shared_memory import shared_carveout

HOPPER = Target()


@given(block=st.integers(16, 512).map(lambda kib: kib << 10), requested=st.integers(0, 512 << 10))
def test_a_cta_is_alone_if_two_do_not_fit(block: int, requested: int) -> None:
    target = Target(shared_bytes_per_block=block)
    alone = target.exclusive_shared_bytes
    # A multiprocessor has the shared memory of one CTA plus the bytes that the hardware reserves.
    assert 2 * (alone + RESERVED_BYTES) > block + RESERVED_BYTES
    assert not target.fits_twice(alone) and target.fits_twice(alone - 256)
    assert alone % 256 == 0 and alone <= block
    assert target.fits_twice(requested) == (
        requested + RESERVED_BYTES <= (block + RESERVED_BYTES) // 2
    )


def launched(op: str, request: LoweringRequest, target: Target = HOPPER) -> OpLaunch:
    """Return the last launch of a decoding op."""
    lower = op_named(op).lower
    assert lower is not None
    return lower(replace(request, phase="decode", target=target)).launches[-1]


@pytest.mark.parametrize(("multiprocessors", "ctas"), [(132, 124), (114, 107), (32, 30), (3, 3)])
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_few_rows_leave_multiprocessors_to_small_launches(
    rows: int, multiprocessors: int, ctas: int
) -> None:
    target = Target(multiprocessors=multiprocessors)
    assert launched("Linear", projection(rows, 4096), target).grid[0] == ctas


@pytest.mark.parametrize("multiprocessors", range(1, 265, 7))
def test_idle_multiprocessors_add_no_work_to_a_cta(multiprocessors: int) -> None:
    for op, request in (("Linear", projection(1, 4096)), ("RmsQkvRope", qkv(1))):
        launch = launched(op, request, Target(multiprocessors=multiprocessors))
        constants = dict(launch.kernel.constants)
        units = int(constants["TILE_COUNT"]) * 8 // int(constants["UNIT_PAIRS"])
        assert -(-units // launch.grid[0]) == -(-units // min(units, multiprocessors))
        assert launch.grid[0] >= multiprocessors - multiprocessors // 16


@pytest.mark.parametrize("experts", [32, 128])
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_the_output_projection_leaves_enough_for_the_router(rows: int, experts: int) -> None:
    lower = op_named("RmsMoe").lower
    assert lower is not None
    request = replace(experts_request(rows, experts), phase="decode")
    router = lower(request).launches[0]
    assert router.kernel.entry == "route_rows"
    left = HOPPER.multiprocessors - launched("Linear", projection(rows, 4096)).grid[0]
    assert router.grid[0] * router.grid[1] <= left
    assert int(dict(router.kernel.constants)["ROUTER_EXPERTS"]) * router.grid[0] == experts


def test_the_qkv_projection_leaves_multiprocessors_to_others() -> None:
    assert launched("RmsQkvRope", qkv(8)).grid[0] == 128
    assert launched("RmsQkvRope", qkv(9)).grid[0] == 132


@pytest.mark.parametrize(("rows", "ctas"), [(1, 124), (8, 124), (9, 132)])
def test_more_than_8_rows_use_every_multiprocessor(rows: int, ctas: int) -> None:
    """The result is the same for bf16 and quantized weights."""
    plain = projection(rows, 4096)
    codes = {**plain.tensors, "weight": TensorInfo((180, 64, 544), "uint8")}
    assert launched("Linear", plain).grid[0] == ctas
    assert launched("Linear", replace(plain, tensors=codes)).grid[0] == ctas


@pytest.mark.parametrize(
    ("sequences", "rows", "list_width", "ctas"),
    [
        (1, 1, 0, 128), (1, 4, 0, 128), (2, 1, 0, 256), (2, 4, 0, 256),
        (1, 1, 2048, 128), (1, 4, 2048, 256), (2, 1, 2048, 256), (2, 4, 2048, 256),
    ],
)  # fmt: skip
def test_attention_has_one_cta_a_multiprocessor_if_possible(
    sequences: int, rows: int, list_width: int, ctas: int
) -> None:
    """Two CTAs on one multiprocessor would leave another idle, unless there are more CTAs."""
    request = replace(attention(sequences, rows, pages=512), tactic={"split_teams": 0})
    if list_width:
        lists = TensorInfo((sequences * rows, 1, list_width), "int32")
        request = replace(request, tensors={**request.tensors, "selected": lists})
    launch = launched("PagedTreeAttention", request)
    needed = int(dict(launch.kernel.constants)["SHARED_BYTES"])
    assert launch.grid[0] * launch.grid[1] * launch.grid[2] == ctas
    if ctas <= HOPPER.multiprocessors:
        assert not HOPPER.fits_twice(launch.shared_bytes)
    else:
        assert launch.shared_bytes == needed


@pytest.mark.parametrize(
    ("shared_bytes", "registers", "threads", "carveout"),
    [
        (65537, 32, 64, 100),  # stages its weights in shared memory
        (65536, 126, 512, 0),  # uses all registers of a multiprocessor
        (52480, 65, 512, 0),  # allocates 72 registers a thread: 36864 of 65536
        (65536, 64, 512, -1),  # two CTAs fit
        (0, 128, 480, 0),
        (0, 40, 1024, 0),
        (0, 18, 256, -1),
    ],
)
def test_shared_memory_carveout(
    shared_bytes: int, registers: int, threads: int, carveout: int
) -> None:
    assert shared_carveout(shared_bytes, registers, threads) == carveout
