"""Named cases: the inputs on which every form of an op must agree with its reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Arrays = tuple[np.ndarray | None, ...]


@dataclass(frozen=True)
class Case:
    """One case of an op.

    ``make`` draws the inputs, in declared order and portable axis order, from a seeded
    generator; whatever the op must not read is poisoned there with NaN (floats) or with ids
    far out of range (integers). ``compare`` maps an output's name to the rows, or other
    index, that the op defines; what it leaves out is unspecified.

    ``kernel_atol`` and ``kernel_rtol`` hold for the kernels, which take activations in bf16.
    """

    name: str
    make: Callable[[np.random.Generator], Arrays]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    atol: float = 1e-5
    rtol: float = 1e-5
    compare: Mapping[str, Any] = field(default_factory=dict)
    kernel_atol: float = 1e-2
    kernel_rtol: float = 2e-2
