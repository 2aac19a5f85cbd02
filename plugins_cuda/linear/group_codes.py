"""Weights of quantized checkpoints in their own codes, in units as kernels decode them.

The value of a code is ``(code - zero point) * scale + minimum`` in fp32, rounded once to bf16: the
weight of an engine that dequantizes the checkpoint. ``nibble_codes.py`` and ``byte_codes.py``
describe the storages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.byte_codes import BYTE_CODECS
from specbuild.plugins_cuda.linear.codec import Codec, CodeForm, GroupedCodes
from specbuild.plugins_cuda.linear.nibble_codes import NIBBLE_CODECS
from specbuild.plugins_cuda.linear.packing import BLOCK, HALF_ROWS, TILE_VALUES
from specbuild.plugins_cuda.linear.storage import Storage

if TYPE_CHECKING:
    import torch

_CODECS: Mapping[Storage, Codec] = {**NIBBLE_CODECS, **BYTE_CODECS}
GROUP_STORAGES = tuple(_CODECS)


def code_storage(forms: Collection[CodeForm], columns: int) -> Storage | None:
    """The storage of a weight of ``columns`` columns whose rows have such codes; None: none has."""
    for storage, codec in _CODECS.items():
        whole = all(f.block[1] >= columns or f.block[1] % codec.columns == 0 for f in forms)
        if whole and all(codec.takes(form) for form in forms):
            return storage
    return None


def codec_of(storage: Storage) -> Codec:
    """How a storage is packed."""
    return _CODECS[storage]


def aligned_parts(weight: GroupedCodes, storage: Storage) -> GroupedCodes:
    """The weight with the parts that ``storage`` has, each for just the columns that share one.

    Rows of such weights can be joined.
    """
    return weight.with_parts(_CODECS[storage].parts)


def pack_codes(weight: GroupedCodes, storage: Storage) -> torch.Tensor:
    """The packed form u8 [tiles, units, elements] of a weight in ``storage``.

    SpecbuildError where a scale is no number of the type that kernels decode.
    """
    return _CODECS[storage].pack(aligned_parts(weight, storage))


def decoded_codes(packed: torch.Tensor, columns: int, storage: Storage) -> torch.Tensor:
    """A packed weight as bf16 values [tiles, columns/32, 512], as ``packing.py`` places them."""
    import torch

    tiles = packed.shape[0]
    values = _CODECS[storage].values(packed)
    rows = values.view(tiles, 2, HALF_ROWS, -1, BLOCK).permute(0, 3, 1, 2, 4)
    return rows.reshape(tiles, -1, TILE_VALUES)[:, : columns // BLOCK].to(torch.bfloat16)
