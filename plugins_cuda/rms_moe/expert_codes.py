"""Experts in the quantized values of a checkpoint: units of ``linear/group_codes.py``.

A tile has the 16 rows and the steps that ``packing.py`` describes, and a unit is two steps of it:
u8 [experts, tiles · units, bytes of a unit]. Rows of a tile of down have the even and the odd
blocks of an output, so that a unit covers 128 columns of INNER.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.plugins_cuda.linear.code_units import UNIT_COLUMNS
from specbuild.plugins_cuda.linear.codec import CodeForm, GroupedCodes, GroupPart
from specbuild.plugins_cuda.linear.group_codes import (
    aligned_parts,
    code_storage,
    decoded_codes,
    pack_codes,
)
from specbuild.plugins_cuda.linear.packing import BLOCK, TILE_VALUES
from specbuild.plugins_cuda.linear.storage import BF16, CODE_STORAGES, MXFP4, Storage
from specbuild.plugins_cuda.rms_moe.packing import (
    TILE_OUTPUTS,
    down_steps,
    gate_up_steps,
    tile_bytes,
)
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    import torch

# Columns of INNER that a unit of down covers.
_DOWN_COLUMNS = 2 * UNIT_COLUMNS


def expert_weight(storage: Storage, experts: int, tiles: int, steps: int) -> TensorInfo:
    """Return type and shape of experts in this storage, with this number of tiles and steps."""
    if storage is BF16:
        return TensorInfo((experts, tiles, TILE_VALUES * steps), storage.dtype)
    if storage is MXFP4:
        return TensorInfo((experts, tiles, tile_bytes(steps)), storage.dtype)
    return TensorInfo((experts, tiles * storage.units(steps), storage.elements), storage.dtype)


def expert_storages(request: LoweringRequest) -> dict[str, Storage]:
    """Return the storages of ``gate_up`` and of ``down``. SpecbuildError if a weight has none."""
    tensors = request.tensors
    hidden = tensors["x"].shape[1]
    experts, two_inner = tensors["gate_up_bias"].shape
    sizes = {
        "gate_up": (two_inner // 2 // TILE_OUTPUTS, gate_up_steps(hidden)),
        "down": (hidden // TILE_OUTPUTS, down_steps(two_inner // 2)),
    }
    return {name: storage_of_experts(tensors[name], experts, *of) for name, of in sizes.items()}


def storage_of_experts(info: TensorInfo, experts: int, tiles: int, steps: int) -> Storage:
    """Return the storage of a packed weight by its tiles and steps.

    SpecbuildError if none matches.
    """
    for storage in (BF16, MXFP4, *CODE_STORAGES):
        if info == expert_weight(storage, experts, tiles, steps):
            return storage
    expected = expert_weight(BF16, experts, tiles, steps)
    raise SpecbuildError(
        f"RmsMoe got experts of {info.dtype} {info.shape}, expected {expected.dtype} "
        f"{expected.shape} or the same tiles in another storage: give weights packed by "
        "rms_moe/packing.py or expert_codes.py"
    )


def down_storage(forms: Collection[CodeForm], inner: int) -> Storage | None:
    """Return the storage of down for experts in these formats, or None if there is none."""
    return code_storage([_down_form(form, inner) for form in forms], down_steps(inner) * BLOCK)


def _down_form(form: CodeForm, inner: int) -> CodeForm:
    """Return the format of the rows of down's tiles, of which every other block is another
    row's.
    """
    rows, columns = form.block
    if columns < inner and columns > BLOCK:
        columns = columns // 2 if columns % _DOWN_COLUMNS == 0 else BLOCK
    return replace(form, block=(rows, columns))


def pack_gate_up_codes(gate: GroupedCodes, up: GroupedCodes, storage: Storage) -> torch.Tensor:
    """Pack the weights [I, H] of one expert as u8 [tiles · units, bytes]."""
    import torch

    def join(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        halves = [part.unflatten(0, (-1, TILE_OUTPUTS)) for part in _as_bytes(first, second)]
        joined = torch.stack(halves, dim=1).flatten(0, 2)
        return joined.view(first.dtype) if first.dtype == torch.float8_e4m3fn else joined

    parts = [aligned_parts(weight, storage) for weight in (gate, up)]
    numbers = {
        name: GroupPart(join(*(part.numbers(name) for part in parts)), of.columns)
        for name, of in parts[0].parts.items()
    }
    codes = join(*(part.codes for part in parts))
    return pack_codes(GroupedCodes(codes, numbers), storage).flatten(0, 1)


def pack_down_codes(down: GroupedCodes, storage: Storage) -> torch.Tensor:
    """Pack a weight [H, I] of one expert as u8 [tiles · units, bytes]."""
    from torch.nn import functional as F

    inner = down.codes.shape[1]
    steps = down_steps(inner)

    def rows_of_tiles(numbers: torch.Tensor, columns: int) -> torch.Tensor:
        """Rearrange values [H, G], one for several columns: even and odd blocks in rows of 16."""
        blocks = numbers.unflatten(1, (steps, 2, BLOCK // columns))
        blocks = blocks.unflatten(0, (-1, TILE_OUTPUTS)).permute(0, 3, 1, 2, 4)
        return blocks.flatten(3).flatten(0, 2)

    (codes,) = _as_bytes(down.codes)
    codes = rows_of_tiles(F.pad(codes, (0, 2 * BLOCK * steps - inner)), 1)
    parts = {}
    for name, part in down.parts.items():
        columns = min(part.columns, BLOCK)
        numbers = part.for_columns(columns, inner).numbers
        parts[name] = GroupPart(rows_of_tiles(numbers, columns), columns)
    return pack_codes(GroupedCodes(codes.view(down.codes.dtype), parts), storage).flatten(0, 1)


def _as_bytes(*codes: torch.Tensor) -> Sequence[torch.Tensor]:
    """View e4m3 values as bytes, which can be rearranged."""
    import torch

    return [c.view(torch.uint8) if c.dtype == torch.float8_e4m3fn else c for c in codes]


def decoded_experts(packed: torch.Tensor, tiles: int, steps: int, storage: Storage) -> torch.Tensor:
    """Dequantize experts u8 [E, tiles · units, bytes] to bf16 [E, tiles, steps · 512]
    (``packing.py``).
    """
    units = packed.reshape(len(packed) * tiles, storage.units(steps), storage.elements)
    return decoded_codes(units, steps * BLOCK, storage).reshape(len(packed), tiles, -1)
