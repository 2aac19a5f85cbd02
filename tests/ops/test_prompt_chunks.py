"""LazyGatedDelta of prompts: chunks of 64 rows against the recurrence in fp64, and their bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from emulation import has_compiler, run_lowering, tensor_info

from specbuild.builder.backends.cuda.tuning.kernel_case import SMALL_TARGET, bits
from specbuild.plugins_cuda.launches import (
    Lowering,
    LoweringRequest,
    OpLaunch,
    Phase,
    TensorInfo,
)
from specbuild.plugins_cuda.lazy_gated_delta import prefill
from specbuild.plugins_cuda.lazy_gated_delta.op import OP
from specbuild.plugins_cuda.opspec import OpSpec

TAPS, EPS, NODES = 4, 1e-6, 4
POOLS = ("tail_pool", "state_pool", "factor_pool")
# Relative to the largest element of a state. The row loop's error is below 5e-7. An operand as two
# bf16 numbers has an error of up to 2⁻¹⁷, a part of which cancels in sums.
STATE_BOUND = 2e-5
RunOp = Callable[..., dict[str, np.ndarray]]


@dataclass
class Layer:
    """A layer's sizes and random weights. ``decay`` is the approximate decay rate of its heads."""

    key_heads: int = 1
    value_heads: int = 2
    key_width: int = 16
    value_width: int = 32
    decay: float = 1.0
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        drawn = torch.Generator().manual_seed(11)
        self.weights = {
            "conv_weight": torch.randn(self.channels, 1, TAPS, generator=drawn).bfloat16(),
            "decay_scale": -self.decay * torch.rand(self.value_heads, generator=drawn),
            "dt_bias": torch.randn(self.value_heads, generator=drawn),
            "norm": torch.randn(self.value_width, generator=drawn).bfloat16(),
        }

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        return self.value_heads * self.value_width

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.values

    def rows(self, seed: int, count: int) -> torch.Tensor:
        """Random rows of a launch."""
        width = self.channels + self.values + 2 * self.value_heads
        return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).bfloat16()

    def pools(self, slots: int) -> dict[str, torch.Tensor]:
        """Return pools whose entries must not be read."""
        factor_width = self.values + self.keys + self.value_heads
        nan = float("nan")
        return {
            "tail_pool": torch.full(
                (slots, TAPS - 1 + NODES, self.channels), nan, dtype=torch.bfloat16
            ),
            "state_pool": torch.full(
                (slots, self.value_heads, self.key_width, self.value_width), nan
            ),
            "factor_pool": torch.full((slots, NODES, factor_width), nan),
        }


def launch(
    layer: Layer,
    pools: dict[str, torch.Tensor],
    pieces: Sequence[tuple[torch.Tensor, int]],
    *,
    phase: Phase = "prefill",
    replays: Sequence[int] | None = None,
    run: RunOp = run_lowering,
    padding: int = 0,
) -> list[torch.Tensor]:
    """Run rows and first position of each sequence in one launch, and replace the pools."""
    counts = [len(rows) for rows, _ in pieces]
    batch, total = len(pieces), sum(counts) + padding
    positions = [p + i for rows, p in pieces for i in range(len(rows))] + [0] * padding
    inputs = {
        "rows": torch.cat([*(rows for rows, _ in pieces), layer.rows(0, padding)]),
        **layer.weights,
        "positions": torch.tensor(positions, dtype=torch.int32),
        "row_start": torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32),
        "ancestor_bits": torch.zeros(total, 1, dtype=torch.int32),
        "state_slot": torch.arange(batch, dtype=torch.int32),
        "replay_path": torch.arange(NODES, dtype=torch.int32).repeat(batch, 1),
        "replay_count": torch.tensor(replays or [0] * batch, dtype=torch.int32),
        **pools,
    }
    outputs = {"output": torch.empty(total, layer.values, dtype=torch.bfloat16)}
    outputs |= {f"{name}_out": inputs[name] for name in POOLS}
    arrays = {name: bits(tensor) for name, tensor in inputs.items()}
    results = {name: bits(tensor) for name, tensor in outputs.items()}
    tensors = {name: tensor_info(array) for name, array in (arrays | results).items()}
    attributes = {"key_heads": layer.key_heads, "eps": EPS, "stores": 1}
    assert OP.lower is not None
    lowered = OP.lower(LoweringRequest(tensors, attributes, phase, SMALL_TARGET))
    raw = run(OP, lowered, arrays, results)
    by_name = {
        name: torch.from_numpy(raw[name].view(np.int16).copy()).view(torch.bfloat16)
        if tensor.dtype == torch.bfloat16
        else torch.from_numpy(raw[name].copy())
        for name, tensor in outputs.items()
    }
    pools |= {name: by_name[f"{name}_out"] for name in POOLS}
    return list(by_name["output"][: sum(counts)].split(counts))


def recurrence(layer: Layer, rows: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Compute the outputs before the norm [T, Hv, Dv] and the last state [Hv, Dk, Dv], in fp64.

    The convolution is rounded to bf16, as in the model.
    """

    def rounded(x: np.ndarray) -> np.ndarray:
        return torch.from_numpy(x.astype(np.float32)).bfloat16().double().numpy()

    x = rows.double().numpy()
    padded = np.concatenate([np.zeros((TAPS - 1, layer.channels)), x[:, : layer.channels]])
    weight = layer.weights["conv_weight"][:, 0].double().numpy()
    mixed = np.zeros((len(x), layer.channels), np.float32)
    for tap in range(TAPS):  # Round as a chain of fused operations does.
        mixed = (mixed + weight[:, tap] * padded[tap : tap + len(x)]).astype(np.float32)
    mixed = rounded(mixed)
    mixed = rounded(mixed / (1 + np.exp(-mixed)))
    q, k, v = np.split(mixed, [layer.keys, 2 * layer.keys], axis=1)
    sharers = layer.value_heads // layer.key_heads

    def unit(y: np.ndarray) -> np.ndarray:
        y = y.reshape(len(x), layer.key_heads, layer.key_width)
        y = y / np.sqrt((y * y).sum(2, keepdims=True) + EPS)
        return y.repeat(sharers, axis=1)

    q, k = unit(q) * layer.key_width**-0.5, unit(k)
    v = v.reshape(len(x), layer.value_heads, layer.value_width)
    logit, step = np.split(x[:, layer.channels + layer.values :], 2, axis=1)
    beta = rounded(1 / (1 + np.exp(-logit)))
    soft = np.log1p(np.exp(step + layer.weights["dt_bias"].double().numpy()))
    decay = np.exp(layer.weights["decay_scale"].double().numpy() * soft)
    state = np.zeros((layer.value_heads, layer.key_width, layer.value_width))
    outputs = np.zeros((len(x), layer.value_heads, layer.value_width))
    for t in range(len(x)):
        state = state * decay[t][:, None, None]
        change = (v[t] - np.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + k[t][:, :, None] * change[:, None, :]
        outputs[t] = np.einsum("hkv,hk->hv", state, q[t])
    return outputs, state


def final_outputs(layer: Layer, rows: torch.Tensor, mixed: np.ndarray) -> torch.Tensor:
    """Apply the norm and the gate [T, Hv·Dv] with PyTorch."""
    from torch.nn import functional as F

    wide = torch.from_numpy(mixed).float().bfloat16().float()
    normed = F.rms_norm(wide, (layer.value_width,), None, EPS).bfloat16() * layer.weights["norm"]
    gate = rows[:, layer.channels : layer.channels + layer.values].float()
    return (normed.flatten(1).float() * F.silu(gate)).bfloat16()


LAYERS = {
    "two value heads a key head": Layer(),
    "heads of 128, three value heads a key head": Layer(1, 3, 128, 128),
    "slow decay": Layer(2, 2, 32, 16, decay=1e-3),
    "fast decay": Layer(1, 4, 16, 16, decay=60.0),
}


def check_against_fp64(layer: Layer, count: int, run: RunOp = run_lowering) -> None:
    """Assert that the state and the outputs of a prompt are within the documented error."""
    rows = layer.rows(1, count)
    mixed, state = recurrence(layer, rows)
    pools = layer.pools(1)
    (outputs,) = launch(layer, pools, [(rows, 0)], run=run)
    error = np.abs(pools["state_pool"][0].numpy() - state).max() / np.abs(state).max()
    assert error < STATE_BOUND
    expected = final_outputs(layer, rows, mixed)
    torch.testing.assert_close(outputs.float(), expected.float(), atol=2e-2, rtol=1.6e-2)
    assert (outputs == expected).float().mean() > 0.97
    assert torch.equal(pools["tail_pool"][0, : TAPS - 1], rows[-(TAPS - 1) :, : layer.channels])


def check_against_rows(layer: Layer, count: int, run: RunOp) -> None:
    """Assert that chunks are within the documented error of the device's row loop."""
    rows, chunks, single = layer.rows(1, count), layer.pools(1), layer.pools(1)
    (actual,) = launch(layer, chunks, [(rows, 0)], run=run)
    (desired,) = launch(layer, single, [(rows, 0)], phase="decode", run=run)
    state, expected = chunks["state_pool"], single["state_pool"]
    assert (state - expected).abs().max() < STATE_BOUND * expected.abs().max()
    torch.testing.assert_close(actual.float(), desired.float(), atol=2e-2, rtol=1.6e-2)
    assert (actual == desired).float().mean() > 0.97


def check_cuts(
    layer: Layer, count: int, cuts: Sequence[Sequence[int]], run: RunOp = run_lowering
) -> None:
    """Assert that no bit depends on where launches end, or on other sequences of a launch."""
    rows, other = layer.rows(2, count), layer.rows(3, 77)
    whole = layer.pools(1)
    (expected,) = launch(layer, whole, [(rows, 0)], run=run)
    for sizes in cuts:
        pools, outputs, first = layer.pools(2), [], 0
        for number, size in enumerate(sizes):
            # The second sequence's chunks begin at any offset in the launch.
            pieces = [(rows[first : first + size], first), (other[: 70 + number], 0)]
            outputs.append(launch(layer, pools, pieces, run=run, padding=number)[0])
            first += size
        assert first == count
        assert torch.equal(torch.cat(outputs), expected)
        assert torch.equal(pools["state_pool"][0], whole["state_pool"][0])
        assert torch.equal(pools["tail_pool"][0, : TAPS - 1], whole["tail_pool"][0, : TAPS - 1])


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")


@pytest.mark.parametrize("count", [128, 150])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@needs_compiler
def test_chunks_agree_with_the_recurrence_in_fp64(layer: Layer, count: int) -> None:
    check_against_fp64(layer, count)


@needs_compiler
def test_errors_do_not_grow_with_the_prompt() -> None:
    """Use a state that retains nearly all of its input."""
    check_against_fp64(Layer(1, 1, 64, 16, decay=1e-6), 640)


@pytest.mark.parametrize("places", [1, 2, 32])
@needs_compiler
def test_launch_boundaries_at_multiples_of_64_change_no_bit(
    places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workspaces hold one chunk, two chunks or all chunks of a launch."""
    monkeypatch.setattr(prefill, "MAX_PLACES", places)
    check_cuts(Layer(), 275, [(275,), (64, 211), (192, 83), (128, 64, 64, 19)])


@needs_compiler
def test_rows_after_the_last_full_chunk_use_the_row_loop() -> None:
    layer = Layer()
    rows = layer.rows(4, 150)
    together, apart = layer.pools(1), layer.pools(1)
    (outputs,) = launch(layer, together, [(rows, 0)])
    (chunks,) = launch(layer, apart, [(rows[:128], 0)])
    (single,) = launch(layer, apart, [(rows[128:], 128)], phase="decode")
    assert torch.equal(outputs, torch.cat([chunks, single]))
    assert torch.equal(together["state_pool"], apart["state_pool"])


@pytest.mark.parametrize(
    ("before", "replayed"), [(9, 0), (64, 2), (70, 1)], ids=["unaligned", "after a step", "both"]
)
@needs_compiler
def test_unaligned_rows_use_the_row_loop(before: int, replayed: int) -> None:
    """The first row is not at a chunk boundary, or rows of a step are not applied yet."""
    layer = Layer()
    rows = layer.rows(5, before + 80)
    runs = []
    for phase in ("prefill", "decode"):
        pools = layer.pools(1)
        launch(layer, pools, [(rows[:before], 0)], phase="decode")
        drawn = torch.Generator().manual_seed(6)
        pools["factor_pool"] = torch.rand(pools["factor_pool"].shape, generator=drawn)
        pools["tail_pool"][:, TAPS - 1 :] = rows[:NODES, : layer.channels]
        (outputs,) = launch(
            layer, pools, [(rows[before:], before)], phase=phase, replays=[replayed]
        )
        runs.append((outputs, pools["state_pool"]))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


@needs_compiler
def test_chunks_have_other_bits_than_single_rows() -> None:
    """Launches that decode, verify or re-run decoding therefore never use chunks."""
    layer = Layer(key_width=32)
    rows = layer.rows(7, 128)
    chunks, single = layer.pools(1), layer.pools(1)
    (actual,) = launch(layer, chunks, [(rows, 0)])
    (desired,) = launch(layer, single, [(rows, 0)], phase="decode")
    assert not torch.equal(chunks["state_pool"], single["state_pool"])
    assert not torch.equal(actual, desired)
    assert {launch.kernel.entry for launch in launches_of(layer, "decode", stores=1)} == {
        "lazy_gated_delta"
    }
    for phase in ("decode", "prefill"):
        assert len(launches_of(layer, phase, stores=0)) == 1
    assert len(launches_of(layer, "prefill", stores=1)) == 4


@needs_compiler
def test_two_ctas_of_a_state_have_the_bits_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(key_heads=2, value_heads=4)
    rows = layer.rows(8, 150)
    results, grids = [], []

    def run(op: OpSpec, lowering: Lowering, *arrays: Any) -> dict[str, np.ndarray]:
        grids.append(lowering.launches[1].grid[0])
        return run_lowering(op, lowering, *arrays)

    for ctas in (1, 2):
        monkeypatch.setattr(prefill, "COLUMN_CTAS", ctas)
        pools = layer.pools(1)
        results.append((launch(layer, pools, [(rows, 0)], run=run)[0], pools["state_pool"]))
    assert grids == [4, 8]
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def launches_of(layer: Layer, phase: Phase, *, stores: int) -> tuple[OpLaunch, ...]:
    """Return the launches for 256 rows of 64 sequences."""
    shapes = {
        "rows": (256, layer.channels + layer.values + 2 * layer.value_heads),
        "ancestor_bits": (256, 1),
        "replay_path": (64, NODES),
        **{name: tuple(w.shape) for name, w in layer.weights.items()},
        **{name: tuple(pool.shape) for name, pool in layer.pools(64).items()},
    }
    tensors = {name: TensorInfo(shape, "bfloat16") for name, shape in shapes.items()}
    attributes = {"key_heads": layer.key_heads, "eps": EPS, "stores": stores}
    assert OP.lower is not None
    return OP.lower(LoweringRequest(tensors, attributes, phase, SMALL_TARGET)).launches
