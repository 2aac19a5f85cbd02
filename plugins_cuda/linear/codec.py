"""What a storage of a quantized checkpoint's codes is made from, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.code_units import UNIT_COLUMNS

if TYPE_CHECKING:
    import torch

# Parts of a weight beside its codes. Where blocks of groups have a scale or a minimum too, those of
# the groups are whole numbers, and count in multiples of the block's.
SCALE, ZERO, MINIMUM = "scale", "zero", "minimum"
BLOCK_SCALE, BLOCK_MINIMUM = "block scale", "block minimum"


@dataclass(frozen=True)
class CodeForm:
    """What decides a weight's storage.

    The numbers that its codes are (``int``, ``e4m3`` …) and their ``bits``; the (rows, columns) of
    a scale; the type of scales as safetensors spells it; whether groups have minima or zero points;
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
    """Numbers [N, G], one for every ``columns`` columns."""

    numbers: torch.Tensor
    columns: int

    def for_columns(self, columns: int, width: int) -> GroupPart:
        """One for every ``columns`` columns, of all units that ``width`` columns take.

        Those of columns past the width are zero.
        """
        import torch

        first = torch.arange(-(-width // UNIT_COLUMNS) * UNIT_COLUMNS // columns) * columns
        places = (first // self.columns).clamp_max(self.numbers.shape[1] - 1)
        return GroupPart(self.numbers[:, places] * (first < width), columns)


@dataclass(frozen=True)
class GroupedCodes:
    """A weight [N, K]: ``codes`` [N, K] and the numbers of groups, by the names above."""

    codes: torch.Tensor
    parts: Mapping[str, GroupPart]

    def with_parts(self, columns: Mapping[str, int]) -> GroupedCodes:
        """The weight with these parts, each for so many columns; minima that it lacks are zero."""
        width = self.codes.shape[1]
        none = GroupPart(self.codes.new_zeros(len(self.codes), 1).float(), width)
        minima = {MINIMUM: none, BLOCK_MINIMUM: none}
        parts = {**minima, **self.parts}
        return GroupedCodes(
            self.codes,
            {name: parts[name].for_columns(size, width) for name, size in columns.items()},
        )

    def numbers(self, name: str) -> torch.Tensor:
        """The numbers of a part."""
        return self.parts[name].numbers


@dataclass(frozen=True)
class Codec:
    """How a storage is packed, and the fp32 values [N, columns of whole units] of what it packed.

    ``parts``: the columns of each part that a weight has. A code has ``bits`` bits. ``takes`` says
    of a form whether the storage has its numbers.
    """

    parts: Mapping[str, int]
    bits: int
    takes: Callable[[CodeForm], bool]
    pack: Callable[[GroupedCodes], torch.Tensor]
    values: Callable[[torch.Tensor], torch.Tensor]

    @property
    def columns(self) -> int:
        """Columns that share a scale."""
        return self.parts[SCALE]
