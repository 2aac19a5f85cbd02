"""The GPU timer over a device of bytes: what it times, compares, and gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from specbuild.builder.backends.cuda.tuning import timer as tune_timer
from specbuild.builder.backends.cuda.tuning.timer import GpuTimer
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

ROWS, COLUMNS, OUTPUTS = 3, 64, 32
MICROSECONDS = {
    "plain": 20.0,
    "fast": 10.0,
    "wrong": 5.0,
    "lazy": 1.0,
    "close": 15.0,
    "failing": np.inf,
}


class Bytes:
    """A device whose kernels are named after what they do; memory is a bytearray a block."""

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
            self.launch(entry, lowering, place)
        return MICROSECONDS[entry] * 1e-6 * len(work)

    def launch(self, entry: str, lowering: Lowering, place: Mapping[str, int]) -> None:
        assert {"x", "weight", "residual", "y"} <= set(place)
        for workspace in lowering.workspaces:
            expected = 0 if workspace.zeroed else 0xFF
            assert (self.bytes_at(place[workspace.name], workspace.nbytes) == expected).all()
        if entry == "lazy":
            return
        if entry == "failing":
            raise UnsupportedHereError("cuLaunchKernelEx failed")
        y = self.bytes_at(place["y"], 2 * ROWS * OUTPUTS)
        x = self.bytes_at(place["x"], 2 * ROWS * OUTPUTS)
        assert not (x == 0xFF).all()
        y[:] = x
        if entry in ("wrong", "close"):
            y[0] ^= 1  # the last bit of the first bf16


def lowering(entry: str) -> Lowering:
    launch = OpLaunch(Kernel("linear", entry), (1, 1, 1), 32, 0, ("x", "y"))
    return Lowering((launch,), (Workspace("a", 40), Workspace("z", 24, zeroed=True)))


def request(phase: Phase) -> LoweringRequest:
    infos = {
        "x": TensorInfo((ROWS, COLUMNS), "bfloat16"),
        "weight": TensorInfo(packed_shape(OUTPUTS, COLUMNS), "bfloat16"),
        "residual": TensorInfo((ROWS, OUTPUTS), "bfloat16"),
        "y": TensorInfo((ROWS, OUTPUTS), "bfloat16"),
    }
    return LoweringRequest(infos, {}, phase)


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> GpuTimer:
    monkeypatch.setattr(tune_timer, "OpRunner", Bytes)
    monkeypatch.setattr(tune_timer, "ROTATED_BYTES", 40_000)
    return GpuTimer(None, 64)  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_times_are_of_one_call_and_other_results_are_told(timer: GpuTimer, phase: Phase) -> None:
    names = ["plain", "fast", "wrong", "lazy", "failing", "close"]
    found = timer.measure(op_named("Linear"), request(phase), [lowering(n) for n in names])
    assert [m.us[0] for m in found] == pytest.approx([MICROSECONDS[n] for n in names])
    decodes = phase == "decode"
    assert [m.agrees for m in found] == [True, True, not decodes, False, False, not decodes]


def test_candidates_are_timed_in_both_orders(timer: GpuTimer) -> None:
    timer.measure(op_named("Linear"), request("decode"), [lowering("plain"), lowering("fast")])
    # Twice each time: once to learn how many launches to take.
    turns: Any = timer._runner
    assert turns.timed == ["plain"] * 2 + ["fast"] * 4 + ["plain"] * 2


def test_weights_stay_until_others_come_and_nothing_is_left(timer: GpuTimer) -> None:
    op, device = op_named("Linear"), timer._runner
    blocks: Any = device.blocks  # type: ignore[attr-defined]
    timer.measure(op, request("decode"), [lowering("plain")])
    kept = set(blocks)
    assert len(kept) > 1
    timer.measure(op, request("decode"), [lowering("fast")])
    assert set(blocks) == kept
    other = request("decode")
    infos = {**other.tensors, "weight": TensorInfo(packed_shape(48, COLUMNS), "bfloat16")}
    timer.measure(op, LoweringRequest(infos, {}), [lowering("plain")])
    assert not kept & set(blocks)
    timer.close()
    assert not blocks
