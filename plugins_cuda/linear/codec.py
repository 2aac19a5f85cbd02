"""The packing of quantized checkpoints: their forms, parts and codecs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.code_units import UNIT_COLUMNS

if TYPE_CHECKING:
    import torch

# Parts of a weight besides its quantized values. If blocks of groups have a scale or a minimum too,
# those of groups are integers, in multiples of the block's.
SCALE, ZERO, MINIMUM = "scale", "zero", "minimum"
BLOCK_SCALE, BLOCK_MINIMUM = "block scale", "block minimum"


@dataclass(frozen=True)
class CodeForm:
    """The properties that determine a weight's storage.

    They are the type of its quantized values (``int``, ``e4m3`` …) and their ``bits``; the (rows,
    columns) of a scale; the safetensors type of scales; whether groups have minima or zero points;
    and whether scales and minima are products of a block's and a group's.
    """

    code_type: str
    bits: int
    block: tuple[int, int]
    scale_dtype: str
    has_minima: bool = False
    has_zero_points: bool = False
    has_factors: bool = False


@dataclass(frozen=True)
class GroupPart:
    """Numbers [N, G], one per ``columns`` columns."""

    numbers: torch.Tensor
    columns: int

    def for_columns(self, columns: int, width: int) -> GroupPart:
        """Return one number per ``columns`` columns, for all units of a row of ``width`` columns.

        Those of columns past the width are zero.
        """
        import torch

        first = torch.arange(-(-width // UNIT_COLUMNS) * UNIT_COLUMNS // columns) * columns
        places = (first // self.columns).clamp_max(self.numbers.shape[1] - 1)
        return GroupPart(self.numbers[:, places] * (first < width), columns)


@dataclass(frozen=True)
class GroupedCodes:
    """A weight [N, K]: quantized ``codes`` [N, K] and the numbers of its groups, by part name."""

    codes: torch.Tensor
    parts: Mapping[str, GroupPart]

    def with_parts(self, columns: Mapping[str, int]) -> GroupedCodes:
        """Return the weight with these parts, one per so many columns; missing minima are zero."""
        width = self.codes.shape[1]
        none = GroupPart(self.codes.new_zeros(len(self.codes), 1).float(), width)
        minima = {MINIMUM: none, BLOCK_MINIMUM: none}
        parts = {**minima, **self.parts}
        return GroupedCodes(
            self.codes,
            {name: parts[name].for_columns(size, width) for name, size in columns.items()},
        )

    def numbers(self, name: str) -> torch.Tensor:
        """Return the numbers of a part."""
        return self.parts[name].numbers


@dataclass(frozen=True)
class Codec:
    """The packing of a storage, and its inverse to fp32 values [N, columns of complete units].

    ``parts`` are the columns of each part of a weight. A quantized value has ``bits`` bits.
    ``takes`` returns whether the storage can hold the numbers of a form. ``table`` lists the values
    that the storage can hold, empty if they are all integers or floats of these bits.
    """

    parts: Mapping[str, int]
    bits: int
    takes: Callable[[CodeForm], bool]
    pack: Callable[[GroupedCodes], torch.Tensor]
    values: Callable[[torch.Tensor], torch.Tensor]
    table: tuple[int, ...] = ()

    @property
    def columns(self) -> int:
        """Columns that share a scale."""
        return self.parts[SCALE]
