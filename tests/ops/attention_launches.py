"""Launches of attention over texts, and the expected result of each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from emulation import run_lowering, tensor_info
from launch_branches import Branch

from specbuild.builder.backends.cuda.tuning.kernel_case import SMALL_TARGET, bits, values
from specbuild.plugins_cuda.kv_write.codes import as_codes, as_values
from specbuild.plugins_cuda.launches import (
    Lowering,
    LoweringRequest,
    Phase,
    Tactic,
    Target,
)
from specbuild.plugins_cuda.paged_tree_attention.op import OP


@dataclass(frozen=True)
class Text:
    """Tokens by position: bf16 bits of q [n, Hq, D], k and v [n, Hkv, D]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @classmethod
    def drawn(cls, length: int, geometry: Geometry, seed: int) -> Text:
        """Return random tokens."""
        generator = torch.Generator().manual_seed(seed)
        heads = (geometry.kv_heads * geometry.group, geometry.kv_heads, geometry.kv_heads)
        drawn = [torch.randn(length, n, geometry.width, generator=generator) for n in heads]
        return cls(*(bits(tensor.bfloat16()) for tensor in drawn))

    def coded(self) -> Text:
        """Return the tokens with keys and values quantized to e4m3, uint8."""
        k, v = (as_codes(torch.from_numpy(_numbers(array))).numpy() for array in (self.k, self.v))
        return Text(self.q, k, v)


@dataclass(frozen=True)
class Geometry:
    """The layer: the arguments of a lowering besides the launch."""

    kv_heads: int = 1
    group: int = 3
    width: int = 16
    page_size: int = 16
    window: int = 0
    words: int = 2


@dataclass(frozen=True)
class Launch:
    """Sequences whose attention is computed in one launch."""

    geometry: Geometry
    sequences: Sequence[Branch[Text]]
    padding_rows: int = 0
    pages: int = 13
    tactic: Tactic = field(default_factory=dict)
    phase: Phase = "decode"
    seed: int = 0
    uneven: bool = False
    target: Target = SMALL_TARGET

    def attended(self) -> list[np.ndarray]:
        """Return the result's bits [rows, Hq, D] of each sequence."""
        inputs = self.inputs()
        result = run_lowering(OP, self.lowering(inputs), inputs, {"attended": inputs["q"]})
        return np.split(result["attended"], inputs["row_start"][1:])[: len(self.sequences)]

    def entries(self) -> list[str]:
        """Return the entry points of the launched kernels."""
        return [launch.kernel.entry for launch in self.lowering(self.inputs()).launches]

    def request(self) -> LoweringRequest:
        """Return the lowering request of the launch."""
        return self._request(self.inputs())

    def lowering(self, inputs: Mapping[str, np.ndarray]) -> Lowering:
        """Lower the request."""
        assert OP.lower is not None
        return OP.lower(self._request(inputs))

    def _request(self, inputs: Mapping[str, np.ndarray]) -> LoweringRequest:
        shapes = {name: tensor_info(array) for name, array in inputs.items()}
        attributes = {"scale": self.geometry.width**-0.5, "window": self.geometry.window}
        tensors = {**shapes, "attended": shapes["q"]}
        return LoweringRequest(
            tensors, attributes, self.phase, self.target, self.tactic, self.uneven
        )

    def inputs(self) -> dict[str, np.ndarray]:
        shape, rng = self.geometry, np.random.default_rng(self.seed)
        size = shape.page_size
        needed = [-(-len(sequence.tokens) // size) for sequence in self.sequences]
        pages = 1 + rng.permutation(sum(needed)).astype(np.int32)
        table = np.zeros((len(needed), 1, max(self.pages, *needed)), np.int32)
        # Unwritten memory is NaN.
        codes = self.sequences[0].text.k.dtype == np.uint8
        blank = np.uint8(0x7F) if codes else np.uint16(0x7FC0)
        pool = np.full((len(pages) + 1, shape.kv_heads, size, shape.width), blank)
        k, v = pool, pool.copy()
        q, slots, words = [], [], []
        for index, sequence in enumerate(self.sequences):
            mine = pages[sum(needed[:index]) : sum(needed[: index + 1])]
            table[index, 0, : len(mine)] = mine
            oldest = self._oldest(sequence)
            for slot, token in enumerate(sequence.tokens):
                if slot >= oldest:
                    k[mine[slot // size], :, slot % size] = sequence.text.k[token]
                    v[mine[slot // size], :, slot % size] = sequence.text.v[token]
            for row, slot in enumerate(sequence.rows):
                q.append(sequence.text.q[sequence.tokens[slot]])
                slots.append(slot)
                words.append(sequence.words(row))
        counts = [len(sequence.rows) for sequence in self.sequences]
        total = len(q) + self.padding_rows
        all_q = np.full((total, shape.kv_heads * shape.group, shape.width), 0x7FC0, np.uint16)
        all_q[: len(q)] = q
        row_slot, ancestors = np.zeros(total, np.int32), np.zeros((total, shape.words), np.uint32)
        row_slot[: len(q)] = slots
        for word in range(shape.words):
            ancestors[: len(q), word] = [w >> (32 * word) & 0xFFFFFFFF for w in words]
        sinks = np.linspace(-1, 1, shape.kv_heads * shape.group).astype(np.float32)
        return {
            "q": all_q,
            "k_pool": k,
            "v_pool": v,
            "page_table": table,
            "row_start": np.cumsum([0, *counts]).astype(np.int32),
            "row_slot": row_slot,
            "tree_start": np.array([s.tree_start for s in self.sequences], np.int32),
            "ancestor_bits": ancestors.view(np.int32),
            "sinks": sinks,
        }

    def _oldest(self, sequence: Branch[Text]) -> int:
        """Return the first slot that a layer with a window still has."""
        if not self.geometry.window or not sequence.rows:
            return 0
        first = min(*sequence.rows, sequence.tree_start)
        return max(0, first - self.geometry.window + 1)


def _numbers(array: np.ndarray) -> np.ndarray:
    """Return the fp32 values of bf16 bits, or of quantized values."""
    if array.dtype != np.uint8:
        return values(array, torch.bfloat16)
    numbers: np.ndarray = as_values(torch.from_numpy(array)).numpy()
    return numbers


def expected(geometry: Geometry, text: Text, position: int) -> np.ndarray:
    """Return dense attention of one token in float64, [Hq, D]."""
    first = max(0, position - geometry.window + 1) if geometry.window else 0
    q, k, v = (
        _numbers(array).astype(np.float64)
        for array in (text.q[position], text.k[first : position + 1], text.v[first : position + 1])
    )
    k, v = (np.repeat(array, geometry.group, axis=1) for array in (k, v))
    scores = np.einsum("hd,shd->hs", q, k) * geometry.width**-0.5
    sinks = np.linspace(-1, 1, len(q))
    weights = np.exp(scores) / (np.exp(scores).sum(1) + np.exp(sinks))[:, None]
    return np.einsum("hs,shd->hd", weights, v)
