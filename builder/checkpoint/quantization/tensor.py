"""A weight in the numbers of a quantized checkpoint: codes, scales, minima, zero points.

Every format of checkpoints reads its weights into this form. A number of the weight is

``(code - zero point) * scale + minimum``

in float32, each operation rounded once. Zero points and minima are optional.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

# What the stored bits of a code denote. ``e2m1`` codes are kept as twice their number (0, 1, 2, 3,
# 4, 6, 8 or 12 with a sign), with half of the scale, and ``iq4`` codes as the entries of IQ4_NL's
# table, so that both are whole numbers. ``float`` codes are the entries of a table of floats.
CodeType = Literal["int", "e4m3", "e2m1", "iq4", "float"]
Block = tuple[int, int]


@dataclass(frozen=True)
class QuantizedForm:
    """What is known of a quantized weight [N, K] before it is read.

    ``name`` is the type in reports (``Q4_K``, ``int4 g128``, ``fp8 128x128``). A code has ``bits``
    bits in the checkpoint. ``block`` is the (rows, columns) that share a scale; blocks
    at the edges may be cut off. ``has_order``: columns of a group need not lie side by side.
    ``nbytes`` is what the checkpoint stores for the weight. ``scale_dtype`` is the type, as
    safetensors spells it, that every scale is a number of. ``has_factors``: scales are products,
    of which the tensor has the factors too.
    """

    name: str
    code_type: CodeType
    bits: int
    block: Block
    nbytes: int
    has_minima: bool = False
    has_zero_points: bool = False
    has_order: bool = False
    scale_dtype: str = "F32"
    has_factors: bool = False


@dataclass(frozen=True)
class ScaleFactors:
    """Scales and minima [N, G] as products: a number of ``columns`` columns times a group's.

    ``block_scales`` and ``block_minima`` are float32 [N, ⌈K / columns⌉], numbers of fp16.
    ``group_scales`` and ``group_minima`` are integers of a byte, [N, G]. NVFP4's ``group_scales``
    are float32, numbers of e4m3, and its ``block_scales`` float64: a product that is rounded to
    float32 is the scale, also where the checkpoint divides by the number of the tensor.
    """

    columns: int
    block_scales: Tensor
    group_scales: Tensor
    block_minima: Tensor | None = None
    group_minima: Tensor | None = None

    def select_rows(self, rows: Tensor) -> ScaleFactors:
        """Return the factors of these rows."""
        minima = (self.block_minima, self.group_minima)
        return ScaleFactors(
            self.columns,
            self.block_scales[rows],
            self.group_scales[rows],
            *(None if part is None else part[rows] for part in minima),
        )


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized weight [N, K], which multiplies as x · Wᵀ: groups lie along K, the inputs.

    ``codes`` are int8, uint8, float8_e4m3fn or float32 [N, K]. ``scales`` are float32
    [⌈N / rows⌉, ⌈K / columns⌉] for blocks of ``form.block``. ``minima`` (float32) and
    ``zero_points`` (int16) have the shape of the scales. ``groups`` int64 [K] is the group of
    every column, a column of ``scales``, where ``form.has_order``; None: column k is of group
    k div ``form.block[1]``.
    """

    form: QuantizedForm
    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None
    zero_points: Tensor | None = None
    groups: Tensor | None = None
    factors: ScaleFactors | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        rows, columns = self.codes.shape
        return rows, columns

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K], computed in float32 and rounded to ``dtype`` at the end.

        Besides the result only a few rows are held in float32.
        """
        rows, columns = self.shape
        whole = torch.empty(rows, columns, dtype=dtype)
        step = self.form.block[0] if self.form.block[0] > 1 else max(1, (1 << 20) // columns)
        step = min(step, max(1, (1 << 22) // columns))
        for first in range(0, rows, step):
            piece = slice(first, first + step)
            places = torch.arange(first, min(first + step, rows)) // self.form.block[0]
            values = self.codes[piece].float()
            if self.zero_points is not None:
                values -= self._spread(self.zero_points[places].float())
            values *= self._spread(self.scales[places])
            if self.minima is not None:
                values += self._spread(self.minima[places])
            whole[piece] = values
        return whole

    def select_rows(self, rows: Tensor) -> QuantizedTensor:
        """Return the weight of these rows, int64 [n], in this order; every row then has its own
        scales.
        """
        form = replace(
            self.form,
            block=(1, self.form.block[1]),
            nbytes=self.form.nbytes * len(rows) // self.shape[0],
        )
        places = rows // self.form.block[0]
        return QuantizedTensor(
            form,
            self.codes.view(torch.uint8)[rows].view(self.codes.dtype),
            self.scales[places],
            None if self.minima is None else self.minima[places],
            None if self.zero_points is None else self.zero_points[places],
            self.groups,
            None if self.factors is None else self.factors.select_rows(rows),
        )

    def _spread(self, parts: Tensor) -> Tensor:
        """Return numbers of groups [n, G] as those of columns, [n, K]."""
        columns = self.shape[1]
        if self.groups is not None:
            return parts[:, self.groups]
        if parts.shape[1] == 1:
            return parts
        return parts.repeat_interleave(self.form.block[1], dim=1)[:, :columns]


@dataclass(frozen=True)
class QuantizedSource:
    """A quantized weight of a checkpoint, not yet read."""

    form: QuantizedForm
    load: Callable[[], QuantizedTensor]

    def select_rows(self, rows: Tensor, count: int) -> QuantizedSource:
        """Return the weight of these rows, int64 [n], of the ``count`` that it has."""
        form = replace(
            self.form,
            block=(1, self.form.block[1]),
            nbytes=self.form.nbytes * len(rows) // count,
        )
        return QuantizedSource(form, lambda: self.load().select_rows(rows))
