"""The GPU timer on a fake device: measurements, comparisons, and released memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from specbuild.builder.backends.cuda.tuning import timer as tune_timer
from specbuild.builder.backends.cuda.tuning.prompt_cuts import cuts_of, row_starts
from specbuild.builder.backends.cuda.tuning.timer import Candidate, GpuTimer, differing_values
from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Phase,
    TensorInfo,
    Workspace,
)
from specbuild.plugins_cuda.linear.packing import packed_shape
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.errors import UnsupportedHereError

ROWS, PROMPT_ROWS, COLUMNS, OUTPUTS = 3, 64, 64, 32
MICROSECONDS = {
    "plain": 20.0,
    "fast": 10.0,
    "wrong": 5.0,
    "lazy": 1.0,
    "close": 15.0,
    "narrow": 15.0,
    "failing": np.inf,
}


class Bytes:
    """A device whose kernels are named after their effect; a memory block is a bytearray."""

    device_name = "a device of bytes"

    def __init__(self, compiler: Any) -> None:
        del compiler
        self.blocks: dict[int, np.ndarray] = {}
        self.next = 1 << 12
        self.synchronised = False
        self.timed: list[str] = []

    def allocate(self, nbytes: int) -> int:
        pointer = self.next
        self.next += nbytes + (1 << 12)
        self.blocks[pointer] = np.full(nbytes, 0xFF, np.uint8)
        return pointer

    def free(self, pointer: int) -> None:
        del self.blocks[pointer]

    def bytes_at(self, pointer: int, nbytes: int) -> np.ndarray:
        base = max(block for block in self.blocks if block <= pointer)
        span = self.blocks[base][pointer - base : pointer - base + nbytes]
        assert len(span) == nbytes, "outside of a block"
        return span

    def upload(self, pointer: int, array: np.ndarray) -> None:
        self.synchronised = False
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.bytes_at(pointer, array.nbytes)[:] = data

    def download(self, pointer: int, array: np.ndarray) -> np.ndarray:
        return self.bytes_at(pointer, array.nbytes).copy().view(array.dtype).reshape(array.shape)

    def synchronize(self) -> None:
        self.synchronised = True

    def time_s(
        self, work: Sequence[tuple[Lowering, Mapping[str, int]]], *, replays: int = 20
    ) -> float:
        del replays
        assert self.synchronised
        (entry,) = {lowering.launches[0].kernel.entry for lowering, _ in work}
        self.timed.append(entry)
        for lowering, place in work:
            self.launch(lowering, place)
        return MICROSECONDS[entry] * 1e-6 * len(work)

    def prepare(self, lowerings: Sequence[Lowering]) -> None:
        assert lowerings

    def launch(
        self, lowering: Lowering, place: Mapping[str, int], *, programmatic: bool = True
    ) -> None:
        del programmatic
        entry, (rows, *_) = lowering.launches[0].kernel.entry, lowering.launches[0].grid
        assert {"x", "weight", "residual", "y"} <= set(place)
        for workspace in lowering.workspaces:
            expected = 0 if workspace.zeroed else 0xFF
            assert (self.bytes_at(place[workspace.name], workspace.nbytes) == expected).all()
        if entry == "lazy":
            return
        if entry == "failing":
            raise UnsupportedHereError("cuLaunchKernelEx failed")
        y = self.bytes_at(place["y"], 2 * rows * OUTPUTS)
        x = self.bytes_at(place["x"], 2 * rows * COLUMNS).reshape(rows, -1)
        assert not (x == 0xFF).all()
        y[:] = x[:, : 2 * OUTPUTS].reshape(-1)
        if entry in ("wrong", "close") or (entry == "narrow" and rows < PROMPT_ROWS):
            y[0] ^= 1  # the last bit of the first bf16


def lowering(entry: str, rows: int = ROWS) -> Lowering:
    launch = OpLaunch(Kernel("linear", entry), (rows, 1, 1), 32, 0, ("x", "y"))
    return Lowering((launch,), (Workspace("a", 40), Workspace("z", 24, zeroed=True)))


def candidates(*entries: str) -> list[Candidate]:
    return [Candidate(lowering(entry)) for entry in entries]


def request(phase: Phase, rows: int = ROWS) -> LoweringRequest:
    infos = {
        "x": TensorInfo((rows, COLUMNS), "bfloat16"),
        "weight": TensorInfo(packed_shape(OUTPUTS, COLUMNS), "bfloat16"),
        "residual": TensorInfo((rows, OUTPUTS), "bfloat16"),
        "y": TensorInfo((rows, OUTPUTS), "bfloat16"),
    }
    return LoweringRequest(infos, {}, phase)


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> GpuTimer:
    monkeypatch.setattr(tune_timer, "OpRunner", Bytes)
    monkeypatch.setattr(tune_timer, "ROTATED_BYTES", 40_000)
    return GpuTimer(None, 64)  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_times_are_per_call_and_different_results_are_reported(
    timer: GpuTimer, phase: Phase
) -> None:
    names = ["plain", "fast", "wrong", "lazy", "failing"]
    result = timer.measure(op_named("Linear"), request(phase), candidates(*names))
    assert [m.us[0] for m in result] == pytest.approx([MICROSECONDS[n] for n in names])
    assert [m.differing for m in result] == [0, 0, 1, ROWS * OUTPUTS, None]


def test_chunks_of_a_prompt_must_have_the_bits_of_the_full_prompt(timer: GpuTimer) -> None:
    """The default and each candidate are checked; one differs in launches of fewer rows."""
    op, whole = op_named("Linear"), request("prefill", PROMPT_ROWS)
    cuts = cuts_of(op, whole)
    names = ["plain", "fast", "narrow", "lazy"]
    candidates_with_splits = [
        Candidate(
            lowering(name, PROMPT_ROWS),
            tuple(tuple(lowering(name, piece.rows) for piece in cut) for cut in cuts),
        )
        for name in names
    ]
    result = timer.measure(op, whole, candidates_with_splits)
    assert [m.differing for m in result] == [0, 0, 6, 3 * PROMPT_ROWS * OUTPUTS]
    blocks: Any = timer._runner.blocks  # type: ignore[attr-defined]
    timer.close()
    assert not blocks


@pytest.mark.parametrize("rows", [64, 100, 256, 1024, 2048])
def test_chunks_cover_every_row_once_in_three_sizes(rows: int) -> None:
    whole = request("prefill", rows)
    cuts = cuts_of(op_named("Linear"), whole)
    assert len(cuts) == 2
    for cut in cuts:
        ids = np.concatenate([np.arange(p.first, p.first + p.rows) for p in cut])
        np.testing.assert_array_equal(ids, np.arange(rows))
        assert len({p.rows for p in cut}) == 3 and all(p.first % 8 == 0 for p in cut)
        for piece in cut:
            assert piece.request.tensors["y"].shape == (piece.rows, OUTPUTS)
            assert piece.request.tensors["weight"] == whole.tensors["weight"]
        starts = [row_starts(np.array([0, 10, 40, rows]), piece) for piece in cut]
        assert sum(start[2] - start[1] for start in starts) == 30
        assert [start[-1] for start in starts] == [piece.rows for piece in cut]
    assert cuts_of(op_named("Linear"), request("decode", rows)) == ()


@pytest.mark.parametrize(
    ("changed", "count"), [((), 0), ((0,), 1), ((2, 3), 1), ((0, 2, 9), 3)], ids=str
)
def test_values_that_differ_in_a_bit_are_counted(changed: tuple[int, ...], count: int) -> None:
    """Ten bytes are five values of two bytes; NaN equals itself, and 0 differs from −0."""
    expected = {"y": np.full(10, 0xFF, np.uint8), "z": np.zeros(2, np.float32)}
    result = {name: array.copy() for name, array in expected.items()}
    result["y"][list(changed)] ^= 0x10
    nbytes = {"y": 2, "z": 4}
    assert differing_values(expected, result, nbytes) == count
    result["z"][1] = -0.0
    assert differing_values(expected, result, nbytes) == count + 1
    assert differing_values(expected, {"y": result["y"]}, nbytes) is None


def test_candidates_are_timed_in_both_orders(timer: GpuTimer) -> None:
    timer.measure(op_named("Linear"), request("decode"), candidates("plain", "fast"))
    # Each time is measured twice: first to determine the number of launches.
    turns: Any = timer._runner
    assert turns.timed == ["plain"] * 2 + ["fast"] * 4 + ["plain"] * 2


def test_weights_are_released_with_the_next_ones_and_at_the_end(timer: GpuTimer) -> None:
    op, device = op_named("Linear"), timer._runner
    blocks: Any = device.blocks  # type: ignore[attr-defined]
    timer.measure(op, request("decode"), candidates("plain"))
    blocks_before = set(blocks)
    assert len(blocks_before) > 1
    timer.measure(op, request("decode"), candidates("fast"))
    assert set(blocks) == blocks_before
    other = request("decode")
    infos = {**other.tensors, "weight": TensorInfo(packed_shape(48, COLUMNS), "bfloat16")}
    timer.measure(op, LoweringRequest(infos, {}), candidates("plain"))
    assert not blocks_before & set(blocks)
    timer.close()
    assert not blocks
