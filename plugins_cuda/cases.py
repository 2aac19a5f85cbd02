"""Named cases: inputs for which every implementation of an op must agree with its reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Arrays = tuple[np.ndarray | None, ...]


@dataclass(frozen=True)
class Case:
    """One case of an op.

    ``make`` draws the inputs, in declared order and portable axis order, from a seeded generator.
    Data that the op must not read are NaN (floats) or ids far out of range (integers). ``compare``
    maps the name of an output to the defined rows, or to another index; other elements are
    unspecified.

    ``kernel_atol`` and ``kernel_rtol`` apply to the kernels, whose activations are bf16.
    """

    name: str
    make: Callable[[np.random.Generator], Arrays]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    atol: float = 1e-5
    rtol: float = 1e-5
    compare: Mapping[str, Any] = field(default_factory=dict)
    kernel_atol: float = 1e-2
    kernel_rtol: float = 2e-2
