"""Draws random inputs of a launch with realistic routing, contexts and pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch

from specbuild.builder.backends.cuda.tactics.tactic_book import rows_of
from specbuild.builder.backends.cuda.tuning.recurrent_inputs import (
    decay_scale,
    factors,
    replay_count,
    replay_path,
    state_slots,
)
from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.plugins_cuda.linear.block_scaled import quantised
from specbuild.plugins_cuda.linear.cases import draw_codes
from specbuild.plugins_cuda.linear.group_codes import GROUP_STORAGES
from specbuild.plugins_cuda.linear.packing import BLOCK, TILE_ROWS, TILE_VALUES
from specbuild.plugins_cuda.linear.storage import BF16, MXFP4, storage_of
from specbuild.plugins_cuda.rms_moe.expert_codes import storage_of_experts
from specbuild.plugins_cuda.rms_moe.packing import (
    TILE_OUTPUTS,
    down_steps,
    gate_up_steps,
    pack_down,
    pack_gate_up,
)
from specbuild.runtime.errors import SpecbuildError

Draw: TypeAlias = "Callable[[LaunchData, TensorInfo], np.ndarray]"

# The maximum number of context tokens of all sequences, which keeps pools smaller than weights.
MAX_CONTEXT = 1 << 17
_TABLE_VALUES = (1 << 22) + 3  # odd, so that large weights repeat it at other offsets
_POOLS = ("k_pool", "v_pool", "c_pool", "key_pool")


@dataclass(frozen=True)
class LaunchData:
    """Inputs for one request in which each sequence has up to ``context`` tokens."""

    request: LoweringRequest
    context: int
    rng: np.random.Generator

    def arrays(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return inputs by name; bf16 as uint16 bits.

        Raises SpecbuildError for an input without a rule.
        """
        arrays = {}
        for name in names:
            if name not in _RULES:
                raise SpecbuildError(f"tune has no rule for the input {name}; add it to inputs.py")
            info = self.request.tensors[name]
            if name in _POOLS:
                info = TensorInfo((self.pages, *info.shape[1:]), info.dtype)
            arrays[name] = _RULES[name](self, info)
        return arrays

    @property
    def rows(self) -> int:
        """Rows of the launch."""
        return rows_of(self.request)

    @property
    def row_start(self) -> np.ndarray:
        """The rows distributed evenly over the sequences, int32 [B + 1]."""
        tensors = self.request.tensors
        batch = tensors["row_start"].shape[0] - 1 if "row_start" in tensors else 1
        return (np.arange(batch + 1) * self.rows // batch).astype(np.int32)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return page_size_of(self.request)

    @property
    def context_lengths(self) -> np.ndarray:
        """Committed tokens of every sequence: different numbers, at most ``context``."""
        table = self.request.tensors["page_table"].shape
        max_rows = int(np.diff(self.row_start).max())
        max_length = min(
            self.context, MAX_CONTEXT // table[0], table[2] * self.page_size - max_rows
        )
        return np.array(
            [max(0, max_length - 7 * b % (max_length // 8 + 1)) for b in range(table[0])], np.int32
        )

    @property
    def pages(self) -> int:
        """The number of pages in pools, including the unused page 0."""
        if "page_table" in self.request.tensors:
            return 1 + int(self.pages_of_sequences.sum())
        return 2 + self.rows // self.page_size

    @property
    def pages_of_sequences(self) -> np.ndarray:
        """Pages in use by each sequence."""
        slots = self.context_lengths + np.diff(self.row_start)
        used: np.ndarray = -(-slots // self.page_size)
        return used

    @property
    def is_tree(self) -> bool:
        """Whether the rows of a sequence are nodes of a tree, which here is a chain."""
        words = self.request.tensors["ancestor_bits"].shape[1]
        max_rows = int(np.diff(self.row_start).max())
        return self.request.phase == "decode" and max_rows <= 32 * words

    def node_of_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return, for every row, its sequence and its index among the sequence's rows."""
        counts = np.diff(self.row_start)
        sequence = np.repeat(np.arange(len(counts)), counts)
        return sequence, np.arange(len(sequence)) - self.row_start[sequence]

    def normal(self, info: TensorInfo, scale: float = 1.0, mean: float = 0.0) -> np.ndarray:
        """Return normally distributed values of the tensor's dtype."""
        count = math.prod(info.shape)
        table = _normal_table(scale, mean, info.dtype)
        first = int(self.rng.integers(len(table)))
        if first + count > len(table):
            table, first = np.resize(np.roll(table, -first), count), 0
        return table[first : first + count].reshape(info.shape)


@lru_cache(maxsize=8)
def _normal_table(scale: float, mean: float, dtype: str) -> np.ndarray:
    """Return values from which tensors are cut, because drawing all values would take minutes."""
    table = np.random.default_rng(0).standard_normal(_TABLE_VALUES, np.float32)
    table = table * np.float32(scale) + np.float32(mean)
    if dtype != "bfloat16":
        return table
    return torch.from_numpy(table).bfloat16().view(torch.int16).numpy().view(np.uint16)


def contexts_for(request: LoweringRequest, context: int) -> tuple[int, ...]:
    """Return the contexts at which a tactic is timed, including a long one for full attention."""
    if "page_table" not in request.tensors or request.phase == "prefill":
        return (context,)
    batch, _, pages = request.tensors["page_table"].shape
    capacity = min(pages * page_size_of(request), MAX_CONTEXT // batch, 16 * context)
    reads_all = not request.attributes["window"]
    return (context, capacity) if reads_all and capacity >= 4 * context else (context,)


def page_size_of(request: LoweringRequest) -> int:
    """Return the tokens per page of a request's caches."""
    return next(request.tensors[name] for name in _POOLS if name in request.tensors).shape[2]


def _activations(data: LaunchData, info: TensorInfo) -> np.ndarray:
    return data.normal(info)


def _cached(data: LaunchData, info: TensorInfo) -> np.ndarray:
    if info.dtype != "uint8":
        return data.normal(info)
    # Every e4m3 number except the two NaN.
    codes = data.rng.integers(0, 127, info.shape, np.uint8)
    return codes | data.rng.integers(0, 2, info.shape, np.uint8) << np.uint8(7)


def _norm(data: LaunchData, info: TensorInfo) -> np.ndarray:
    return data.normal(info, 0.2, 1.0)


def _bias(data: LaunchData, info: TensorInfo) -> np.ndarray:
    return data.normal(info, 0.3)


def _packed(data: LaunchData, info: TensorInfo) -> np.ndarray:
    """Return a packed dense weight: random bf16 values, or repeated quantized tiles."""
    if info.dtype == "bfloat16":
        return data.normal(info, (info.shape[1] * BLOCK) ** -0.5)
    columns = data.request.tensors["x"].shape[1]
    tiles, blocks = info.shape[0], columns // BLOCK
    distinct = min(tiles, max(1, _TABLE_VALUES // (blocks * TILE_VALUES)))
    storage = storage_of(info)
    if storage in GROUP_STORAGES:
        quantized_tiles = draw_codes(data.rng, distinct * TILE_ROWS, columns, storage)
        return quantized_tiles[np.arange(tiles) % distinct]
    drawn = TensorInfo((distinct, blocks, TILE_VALUES), "bfloat16")
    bits = torch.from_numpy(data.normal(drawn, columns**-0.5).view(np.int16))
    codes = quantised(bits.view(torch.bfloat16), storage).numpy()
    repeated: np.ndarray = codes[np.arange(tiles) % distinct]
    return repeated


def _rebuilding(data: LaunchData, info: TensorInfo) -> np.ndarray:
    """Return a weight that rebuilds keys or values from latents."""
    return data.normal(info, info.shape[0] ** -0.5)


def _router(data: LaunchData, info: TensorInfo) -> np.ndarray:
    return data.normal(info, info.shape[1] ** -0.5)


def _gate_up(data: LaunchData, info: TensorInfo) -> np.ndarray:
    """Return the gate/up weight of all experts, or of a dense layer."""
    if "gate_up_bias" not in data.request.tensors:
        return _packed(data, info)
    hidden = data.request.tensors["x"].shape[1]
    rows = data.request.tensors["gate_up_bias"].shape[1]
    tiles = rows // TILE_ROWS, gate_up_steps(hidden)
    return _experts(data, info, pack_gate_up, (rows, hidden), tiles)


def _down(data: LaunchData, info: TensorInfo) -> np.ndarray:
    hidden = data.request.tensors["x"].shape[1]
    inner = data.request.tensors["gate_up_bias"].shape[1] // 2
    tiles = hidden // TILE_OUTPUTS, down_steps(inner)
    return _experts(data, info, pack_down, (hidden, inner), tiles)


def _experts(
    data: LaunchData,
    info: TensorInfo,
    pack: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    sizes: tuple[int, int],
    cut: tuple[int, int],
) -> np.ndarray:
    """Return packed experts of (rows, columns) in (tiles, steps). Quantized ones are copies."""
    rows, columns = sizes
    storage = storage_of_experts(info, info.shape[0], *cut)
    if storage is BF16:
        return data.normal(info, columns**-0.5)
    if storage is not MXFP4:
        units = draw_codes(data.rng, cut[0] * TILE_ROWS, cut[1] * BLOCK, storage)
        return np.repeat(units.reshape(1, -1, storage.elements), info.shape[0], axis=0)
    blocks = data.rng.integers(0, 256, (1, rows, columns // 32, 16), dtype=np.uint8)
    middle = 126 - round(math.log2(2.9 * columns**0.5))
    scales = data.rng.integers(middle - 1, middle + 3, blocks.shape[:3], dtype=np.uint8)
    packed = pack(torch.from_numpy(blocks), torch.from_numpy(scales)).numpy()
    return np.repeat(packed, info.shape[0], axis=0)


def _rotation(function: Callable[[np.ndarray], np.ndarray]) -> Draw:
    def draw(data: LaunchData, info: TensorInfo) -> np.ndarray:
        return function(data.rng.uniform(0, 6.3, info.shape)).astype(np.float32)

    return draw


def _positions(data: LaunchData, info: TensorInfo) -> np.ndarray:
    table = data.request.tensors.get("cos")
    num_positions = data.context if table is None else table.shape[0]
    return data.rng.integers(0, num_positions, info.shape).astype(np.int32)


def _write_slot(data: LaunchData, info: TensorInfo) -> np.ndarray:
    slots = data.page_size + data.rng.permutation((data.pages - 1) * data.page_size)
    return slots[: info.shape[0]].astype(np.int32)


def _page_table(data: LaunchData, info: TensorInfo) -> np.ndarray:
    used = data.pages_of_sequences
    ids = 1 + data.rng.permutation(int(used.sum())).astype(np.int32)
    table = np.zeros(info.shape, np.int32)
    for sequence, end in enumerate(np.cumsum(used)):
        table[sequence, :, : used[sequence]] = ids[end - used[sequence] : end]
    return table


def _page_position(data: LaunchData, info: TensorInfo) -> np.ndarray:
    starts = data.page_size * np.arange(info.shape[1], dtype=np.int32)
    return np.broadcast_to(starts, info.shape).copy()


def _row_slot(data: LaunchData, info: TensorInfo) -> np.ndarray:
    sequence, node = data.node_of_rows()
    slots = np.zeros(info.shape, np.int32)
    slots[: len(node)] = data.context_lengths[sequence] + node
    return slots


def _tree_start(data: LaunchData, info: TensorInfo) -> np.ndarray:
    del info
    return (data.context_lengths + (0 if data.is_tree else np.diff(data.row_start))).astype(
        np.int32
    )


def _ancestor_bits(data: LaunchData, info: TensorInfo) -> np.ndarray:
    words = np.zeros(info.shape, np.uint32)
    if data.is_tree:
        for row, node in enumerate(data.node_of_rows()[1]):
            for ancestor in range(int(node) + 1):
                words[row, ancestor // 32] |= np.uint32(1 << ancestor % 32)
    return words.view(np.int32)


def _logit_rows(data: LaunchData, info: TensorInfo) -> np.ndarray:
    return data.rng.permutation(np.resize(np.arange(data.rows), info.shape)).astype(np.int32)


def _temperature(data: LaunchData, info: TensorInfo) -> np.ndarray:
    """Return temperatures that alternate between greedy and sampled rows."""
    drawn = data.rng.uniform(0.5, 1.2, info.shape).astype(np.float32)
    drawn[::2] = 0
    return drawn


def _integers(data: LaunchData, info: TensorInfo) -> np.ndarray:
    return data.rng.integers(0, 1 << 20, info.shape).astype(np.int32)


def _filled(value: float) -> Draw:
    def draw(data: LaunchData, info: TensorInfo) -> np.ndarray:
        del data
        return np.full(info.shape, value, np.float32)

    return draw


def _zeros(data: LaunchData, info: TensorInfo) -> np.ndarray:
    """Return the memory of an exchange: rounds begin at 1, and waits have no limit."""
    del data
    return np.zeros(info.shape, np.int32)


_RULES: Mapping[str, Draw] = {
    "inbox": _zeros,
    "state": _zeros,
    "fault": _zeros,
    "x": _activations,
    "q": _activations,
    "residual": _activations,
    "k_pool": _cached,
    "v_pool": _cached,
    "c_pool": _activations,
    "key_pool": _cached,
    "sinks": _activations,
    "rows": _activations,
    "conv_weight": _bias,
    "decay_scale": decay_scale,
    "dt_bias": _bias,
    "state_slot": state_slots,
    "replay_path": replay_path,
    "replay_count": replay_count,
    "tail_pool": _activations,
    "state_pool": _activations,
    "factor_pool": factors,
    "norm": _norm,
    "q_norm": _norm,
    "k_norm": _norm,
    "latent_norm": _norm,
    "router_norm": _norm,
    "weight": _packed,
    "codes": _packed,
    "errors": _filled(0.02),
    "router_weight": _router,
    "expert_scale": _norm,
    "gate_up": _gate_up,
    "down": _down,
    "bias": _bias,
    "w_k": _rebuilding,
    "w_v": _rebuilding,
    "b_k": _bias,
    "b_v": _bias,
    "router_bias": _bias,
    "choice_bias": _bias,
    "gate_up_bias": _bias,
    "down_bias": _bias,
    "cos": _rotation(np.cos),
    "sin": _rotation(np.sin),
    "positions": _positions,
    "position": _positions,
    "write_slot": _write_slot,
    "page_table": _page_table,
    "page_position": _page_position,
    "row_start": lambda data, _: data.row_start,
    "row_slot": _row_slot,
    "tree_start": _tree_start,
    "ancestor_bits": _ancestor_bits,
    "logit_rows": _logit_rows,
    "temperature": _temperature,
    "top_k": lambda _, info: np.full(info.shape, 40, np.int32),
    "top_p": _filled(0.95),
    "floor": _filled(0.0),
    "kept": _filled(0.0),
    "seed": _integers,
}
