"""Draft trees of a batch: one tree of tokens per sequence, in arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from specbuild.runtime.engine_dir.manifest import DraftShape, Limits
from specbuild.runtime.errors import RequestError


@dataclass(frozen=True)
class DraftTrees:
    """Trees of B sequences with N + 1 slots each; all arrays are int32.

    ``tokens``, ``parents`` and ``depths`` are [B, N+1], ``ancestor_bits`` is [B, N+1, W].
    ``count`` [B] is the number of slots in use, root included. Slot 0 is the root; unused slots and
    the root have parent -1. Slots are in order of depth. ``contiguous``: all trees are chains, so
    every path has the slots 0, 1, 2, …. ``full``: no slot of any tree is unused.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    ancestor_bits: np.ndarray
    count: np.ndarray
    contiguous: bool
    full: bool = False

    @property
    def nodes(self) -> int:
        """N: draft nodes of the widest tree."""
        return self.tokens.shape[1] - 1

    def accept_feeds(self, sampled: np.ndarray) -> dict[str, np.ndarray]:
        """Return the inputs of the role ``accept``.

        ``sampled`` [B, N+1] is the token that the target emits after each slot.
        """
        return {
            "tokens": self.tokens,
            "parents": self.parents,
            "ancestor_bits": self.ancestor_bits,
            "count": self.count,
            "choice": sampled,
        }

    def path(self, b: int, slot: int) -> list[int]:
        """Return the draft tokens of sequence ``b`` from below its root to ``slot``."""
        path = []
        while slot > 0:
            path.append(int(self.tokens[b, slot]))
            slot = int(self.parents[b, slot])
        return path[::-1]

    def leaf_paths(self, b: int) -> list[Sequence[int]]:
        """Return the slots from the root of sequence ``b`` to each of its leaves."""
        count = int(self.count[b])
        if self.contiguous:
            return [range(count)]
        parents = self.parents[b, :count].tolist()
        paths: list[Sequence[int]] = []
        for leaf in sorted(set(range(count)) - set(parents[1:])):
            path, slot = [], leaf
            while slot >= 0:
                path.append(slot)
                slot = parents[slot]
            paths.append(path[::-1])
        return paths

    def child(self, b: int, slot: int, token: int) -> int | None:
        """Return the child of ``slot`` in sequence ``b`` with this token, or None."""
        used = slice(0, self.count[b])
        matches = (self.parents[b, used] == slot) & (self.tokens[b, used] == token)
        nodes = matches[1:].nonzero()[0]
        return int(nodes[0]) + 1 if len(nodes) else None

    def cut(self, max_depth: Sequence[int]) -> DraftTrees:
        """Return each tree without the nodes below ``max_depth[b]``, and without unused slots."""
        bound = np.asarray(max_depth, np.int32)[:, None]
        slot = np.arange(self.tokens.shape[1])
        used = (slot < self.count[:, None]) & (self.depths <= bound)
        count = used.sum(axis=1, dtype=np.int32)
        width = int(count.max())
        used = used[:, :width]
        return DraftTrees(
            tokens=np.where(used, self.tokens[:, :width], -1),
            parents=np.where(used, self.parents[:, :width], -1),
            depths=np.where(used, self.depths[:, :width], 0),
            ancestor_bits=np.ascontiguousarray(self.ancestor_bits[:, :width]),
            count=count,
            contiguous=self.contiguous,
            full=bool((count == width).all()),
        )


def pack_bits(bits: np.ndarray) -> np.ndarray:
    """Pack bools [..., n] into int32 words [..., ceil(n / 32)].

    Bool j becomes bit ``j % 32`` of word ``j // 32``.
    """
    words = max(1, -(-bits.shape[-1] // 32))
    padded = np.zeros((*bits.shape[:-1], words * 32), np.uint8)
    padded[..., : bits.shape[-1]] = bits
    return np.packbits(padded, axis=-1, bitorder="little").view("<i4").astype(np.int32, copy=False)


@lru_cache(maxsize=256)
def _chain_layout(batch: int, nodes: int) -> tuple[np.ndarray, ...]:
    slot = np.arange(nodes + 1, dtype=np.int32)
    bits = pack_bits(np.tri(nodes + 1, dtype=bool))
    layout = (
        np.tile(slot - 1, (batch, 1)),
        np.tile(slot, (batch, 1)),
        np.tile(bits, (batch, 1, 1)),
        np.full(batch, nodes + 1, np.int32),
    )
    for array in layout:
        array.setflags(write=False)
    return layout


def chain_trees(roots: Sequence[int], tokens: np.ndarray | None = None) -> DraftTrees:
    """Return chains of ``tokens`` [B, N] below the roots, or the roots alone."""
    batch = len(roots)
    nodes = 0 if tokens is None else tokens.shape[1]
    parents, depths, bits, count = _chain_layout(batch, nodes)
    all_tokens = np.empty((batch, nodes + 1), np.int32)
    all_tokens[:, 0] = roots
    if tokens is not None:
        all_tokens[:, 1:] = tokens
    return DraftTrees(all_tokens, parents, depths, bits, count, contiguous=True, full=True)


def check_shape(shape: DraftShape, limits: Limits | None) -> None:
    """Raise RequestError if a shape is not a tree, or exceeds the engine's limits."""
    for name in ("draft_top_k", "draft_depth", "draft_tokens"):
        value = getattr(shape, name)
        if value < 1:
            raise RequestError(f"{name} is {value}, must be 1 or above")
        if limits is not None and value > getattr(limits, name):
            raise RequestError(
                f"{name} is {value}, but the engine was built for at most "
                f"{getattr(limits, name)}; request less or rebuild with a higher limit"
            )
    if shape.draft_tokens > shape.candidates:
        raise RequestError(
            f"draft_tokens is {shape.draft_tokens}, but draft_top_k {shape.draft_top_k} and "
            f"draft_depth {shape.draft_depth} allow only {shape.candidates}"
        )


def shallower(shape: DraftShape, depth: int) -> DraftShape:
    """Return the shape cut to ``depth`` levels.

    ``draft_tokens`` falls to the number of candidates that these levels have.
    """
    if depth >= shape.draft_depth:
        return shape
    cut = replace(shape, draft_depth=depth)
    return replace(cut, draft_tokens=min(cut.draft_tokens, cut.candidates))


@lru_cache(maxsize=256)
def chain_bits(level: int, depth: int, batch: int) -> np.ndarray:
    """Return ancestor bits [B, W] of a chain's node at ``level``: its own and all earlier slots."""
    slots = np.arange(max(depth - 1, 1)) < level
    return read_only(np.repeat(pack_bits(slots[None]), batch, axis=0))


@lru_cache(maxsize=64)
def slot_bits(top_k: int, depth: int) -> np.ndarray:
    """Return the bit of each tree slot: uint32 [D − 1, K, W].

    Entry [l − 1, j] has the bit of slot (l − 1)·K + j.
    """
    slots = top_k * max(depth - 1, 1)
    bits = pack_bits(np.eye(slots, dtype=bool)).view(np.uint32)
    return read_only(bits.reshape(-1, top_k, bits.shape[1]))


def read_only(array: np.ndarray) -> np.ndarray:
    """Return the array, which may no longer be written to."""
    array.setflags(write=False)
    return array
