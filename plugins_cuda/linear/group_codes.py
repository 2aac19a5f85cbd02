"""Weights of quantized checkpoints in the values of the checkpoint, in units for kernels.

A value is dequantized as ``(code - zero point) * scale + minimum`` in fp32 and rounded once to
bf16. This is the weight of an engine that stores the dequantized checkpoint. ``nibble_codes.py``,
``table_codes.py`` and ``byte_codes.py`` describe the storages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.byte_codes import BYTE_CODECS
from specbuild.plugins_cuda.linear.codec import Codec, CodeForm, GroupedCodes
from specbuild.plugins_cuda.linear.nibble_codes import NIBBLE_CODECS
from specbuild.plugins_cuda.linear.packing import BLOCK, HALF_ROWS, TILE_VALUES
from specbuild.plugins_cuda.linear.slices import has_whole_rounds
from specbuild.plugins_cuda.linear.storage import INT4_SYMMETRIC, Storage
from specbuild.plugins_cuda.linear.table_codes import TABLE_CODECS

if TYPE_CHECKING:
    import torch

_CODECS: Mapping[Storage, Codec] = {**NIBBLE_CODECS, **TABLE_CODECS, **BYTE_CODECS}
GROUP_STORAGES = tuple(_CODECS)


def code_storage(forms: Collection[CodeForm], columns: int) -> Storage | None:
    """Return the storage of a weight of ``columns`` columns with rows of these forms, or None."""
    for storage, codec in _CODECS.items():
        # Where steps are no whole rounds, this storage takes a quarter more time than INT4_BF16.
        if storage is INT4_SYMMETRIC and not has_whole_rounds(columns // BLOCK, storage):
            continue
        whole = all(f.block[1] >= columns or f.block[1] % codec.columns == 0 for f in forms)
        if whole and all(codec.takes(form) for form in forms):
            return storage
    return None


def codec_of(storage: Storage) -> Codec:
    """Return the codec of a storage."""
    return _CODECS[storage]


def aligned_parts(weight: GroupedCodes, storage: Storage) -> GroupedCodes:
    """Return the weight with the parts of ``storage``, each for the columns that share one.

    Rows of such weights can be concatenated.
    """
    return weight.with_parts(_CODECS[storage].parts)


def pack_codes(weight: GroupedCodes, storage: Storage) -> torch.Tensor:
    """Pack a weight in ``storage``: [tiles, units, elements] of its type.

    Raises SpecbuildError if a scale is not representable in the type that kernels decode.
    """
    import torch

    packed = _CODECS[storage].pack(aligned_parts(weight, storage))
    return packed.view(getattr(torch, storage.dtype))


def decoded_codes(packed: torch.Tensor, columns: int, storage: Storage) -> torch.Tensor:
    """Convert a packed weight to bf16 values [tiles, columns/32, 512] in ``packing.py``'s order."""
    import torch

    tiles = packed.shape[0]
    values = _CODECS[storage].values(packed.view(torch.uint8))
    rows = values.view(tiles, 2, HALF_ROWS, -1, BLOCK).permute(0, 3, 1, 2, 4)
    return rows.reshape(tiles, -1, TILE_VALUES)[:, : columns // BLOCK].to(torch.bfloat16)
