"""Adds rows to launches so that the bits of a row do not depend on the number of rows.

Quantized products of a CPU engine round activations, and ONNX Runtime has several kernels for them.
On processors with AVX2 but not AVX-512, one row has other bits than two. On others an odd number of
rows has, for large blocks. Drafts would then change tokens whose logits are close. The engine
includes a small graph of its products, which determines the processor's behaviour once at load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specbuild.runtime.engine_dir.manifest import Port, Role

PROBE_FILE, PROBE_COLUMNS = "row_probe.onnx", 512
# Launches of up to this number of rows are compared: those that decode or verify a tree.
COMPARED_ROWS = 16

Padding = Callable[[int], int]


def unpadded(rows: int) -> int:
    """Return the number of rows unchanged."""
    return rows


def at_least_two(rows: int) -> int:
    """Return two rows instead of one."""
    return max(rows, 2)


def even(rows: int) -> int:
    """Return the next even number of rows."""
    return rows + rows % 2


# In order of cost.
PADDINGS: Sequence[Padding] = (unpadded, at_least_two, even)


def padding_here(probe: Callable[[np.ndarray], Sequence[np.ndarray]]) -> Padding | None:
    """Return the cheapest padding with which the bits of a row depend on nothing else.

    ``probe`` maps rows [T, K] to the products of each kernel. Returns None if no padding suffices.
    """
    shape = (COMPARED_ROWS, PROBE_COLUMNS)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    products = {rows: probe(x[:rows]) for rows in range(1, COMPARED_ROWS + 1)}
    largest = products[COMPARED_ROWS]
    equal = {
        rows: all(
            np.array_equal(part, all_rows[:rows])
            for part, all_rows in zip(parts, largest, strict=True)
        )
        for rows, parts in products.items()
    }
    for padding in PADDINGS:
        if all(equal[padding(rows)] for rows in products):
            return padding
    return None


class RowPadder:
    """Adds rows to the inputs of a role, and removes them from its outputs.

    An added row repeats the last row of the launch. It writes its keys and values to page 0, which
    is never read.
    """

    def __init__(self, role: Role, padding: Padding) -> None:
        self._padding = padding
        self._inputs = {axis: _along(role.inputs, axis) for axis in ("T", "R")}
        self._outputs = {axis: _along(role.outputs, axis) for axis in ("T", "R")}

    def padded(self, feeds: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], Any]:
        """Return the inputs with the rows that the padding requires, and the argument of
        :meth:`cut`.
        """
        padded = dict(feeds)
        counts = {"T": len(feeds["token_ids"]), "R": len(feeds["logit_rows"])}
        for axis, count in counts.items():
            added = self._padding(count) - count if count else 0
            if not added:
                continue
            for name in self._inputs[axis]:
                array = feeds[name]
                last = array[-1:] * 0 if name.endswith(".write_slot") else array[-1:]
                padded[name] = np.concatenate([array, np.repeat(last, added, axis=0)])
            if axis == "T":
                starts = feeds["row_start"].copy()
                starts[-1] += added
                padded["row_start"] = starts
        return padded, counts

    def cut(self, outputs: dict[str, np.ndarray], counts: Any) -> dict[str, np.ndarray]:
        """Return the outputs without the added rows."""
        for axis, names in self._outputs.items():
            for name in names:
                outputs[name] = outputs[name][: counts[axis]]
        return outputs


def _along(ports: Sequence[Port], axis: str) -> tuple[str, ...]:
    """Return the ports whose first axis is this one."""
    return tuple(port.name for port in ports if port.shape[:1] == (axis,))
