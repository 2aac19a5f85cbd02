"""The storage formats of packed dense weights: bf16, or quantized values with scales.

A tile of 16 rows is divided into *units* of one or two blocks of 32 columns, which kernels load
completely:

    bf16   [N/16, K/32, 512]         bf16   the values (``packing.py``)
    fp8    [N/16, ⌈K/64⌉, 1056]      uint8  1024 e4m3 values and 32 scales (``block_scaled.py``)
    mxfp4  [N/16, ⌈K/64⌉, 544]       uint8  1024 e2m1 values, two per byte, and 32 scales
    int8   [N/16, ⌈K/64⌉, 1056]      uint8  1024 signs and magnitudes and 32 scales
    int4, int4-g32, q8 (each also -bf16), q4_1, q5_1, iq4, nvfp4, q4_k, q5_k, q6_k, k-mixed,
    fp8-block, fp8-rows, mixed
           [N/16, ⌈K/64⌉, elements]  uint8  values of a checkpoint (``group_codes.py``)
    int4-symmetric
           [N/16, ⌈K/64⌉, 136]       int32  the same, in words

fp8, mxfp4 and int8 have powers of two as scales and round a bf16 weight. The others keep the
quantized values of a checkpoint. The shape and type of a weight determine its format; K is that of
the tokens. int8 is for prefilters only (``head_screen``).
"""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.plugins_cuda.launches import TensorInfo
from specbuild.plugins_cuda.linear.packing import BLOCK, TILE_ROWS
from specbuild.runtime.engine_dir.plan import ITEM_BYTES
from specbuild.runtime.errors import SpecbuildError

LOAD_BYTES = 512
# Registers of a 16-byte load.
_LOAD_WORDS = 4


@dataclass(frozen=True)
class Storage:
    """One format; ``code`` is its number in kernels (``_device/weight_units.cuh``).

    ``loads``: 16-byte loads of a lane for a unit. ``elements``: a unit's size on the last axis.
    ``heavy``: decoding needs so many registers that steps must be separate (``kSeparateSteps``).
    ``scale_words``: registers of a lane for a unit besides the loads, including those of decoding.
    """

    name: str
    code: int
    dtype: str
    unit_blocks: int
    loads: int
    elements: int
    heavy: bool = False
    scale_words: int = 1

    @property
    def scaled(self) -> bool:
        """Whether a unit has scales besides its values."""
        return self.dtype != "bfloat16"

    @property
    def unit_bytes(self) -> int:
        """The bytes of a unit."""
        return self.elements * ITEM_BYTES[self.dtype]

    def units(self, blocks: int) -> int:
        """Return the units of ``blocks`` blocks."""
        return -(-blocks // self.unit_blocks)

    def held_loads(self, usual: int) -> int:
        """Return the loads in flight that fit in the registers of ``usual`` loads with one scale
        word.
        """
        words = _LOAD_WORDS * self.loads
        return max(1, usual * (words + 1) // (words + self.scale_words))


BF16 = Storage("bf16", 0, "bfloat16", 1, 2, LOAD_BYTES)
FP8 = Storage("fp8", 1, "uint8", 2, 2, 2 * LOAD_BYTES + 2 * TILE_ROWS)
MXFP4 = Storage("mxfp4", 2, "uint8", 2, 1, LOAD_BYTES + 2 * TILE_ROWS)
INT8 = Storage("int8", 3, "uint8", 2, 2, FP8.elements)
INT4 = Storage("int4", 4, "uint8", 2, 1, LOAD_BYTES + 3 * TILE_ROWS, heavy=True)
INT4_G32 = Storage("int4-g32", 5, "uint8", 2, 1, LOAD_BYTES + 5 * TILE_ROWS, heavy=True)
Q8 = Storage("q8", 6, "uint8", 2, 2, 2 * LOAD_BYTES + 4 * TILE_ROWS, heavy=True)
FP8_BLOCK = Storage("fp8-block", 7, "uint8", 2, 2, 2 * LOAD_BYTES + TILE_ROWS, heavy=True)
# The last bytes of q4_1, q5_1, iq4, nvfp4, fp8-rows and of storages with bf16 scales are unused:
# they make the sizes of all storages different.
Q4_1 = Storage("q4_1", 8, "uint8", 2, 1, LOAD_BYTES + 9 * TILE_ROWS, heavy=True)
Q5_1 = Storage("q5_1", 17, "uint8", 2, 1, LOAD_BYTES + 17 * TILE_ROWS, True, 6)
IQ4 = Storage("iq4", 18, "uint8", 2, 1, LOAD_BYTES + 10 * TILE_ROWS, True, 6)
NVFP4 = Storage("nvfp4", 19, "uint8", 2, 1, LOAD_BYTES + 7 * TILE_ROWS, True, 6)
Q4_K = Storage("q4_k", 9, "uint8", 2, 1, LOAD_BYTES + 8 * TILE_ROWS, True, 3)
Q5_K = Storage("q5_k", 10, "uint8", 2, 1, LOAD_BYTES + 16 * TILE_ROWS, True, 6)
Q6_K = Storage("q6_k", 11, "uint8", 2, 1, LOAD_BYTES + 22 * TILE_ROWS, True, 7)
# Rows of Q4_K, Q5_K and Q6_K in one weight.
K_MIXED = Storage("k-mixed", 16, "uint8", 2, 1, LOAD_BYTES + 26 * TILE_ROWS, True, 8)
FP8_ROWS = Storage("fp8-rows", 12, "uint8", 2, 2, 2 * LOAD_BYTES + 5 * TILE_ROWS, heavy=True)
# Rows of integers in any types.
MIXED = Storage("mixed", 20, "uint8", 2, 2, 2 * LOAD_BYTES + 24 * TILE_ROWS, True, 6)
# The same with bf16 scales.
INT4_BF16 = Storage("int4-bf16", 13, "uint8", 2, 1, INT4.elements + TILE_ROWS, heavy=True)
INT4_G32_BF16 = Storage("int4-g32-bf16", 14, "uint8", 2, 1, INT4_G32.elements + TILE_ROWS, True)
Q8_BF16 = Storage("q8-bf16", 15, "uint8", 2, 2, Q8.elements + 2 * TILE_ROWS, heavy=True)
# Words, because bytes of this size are MXFP4.
INT4_SYMMETRIC = Storage("int4-symmetric", 21, "int32", 2, 1, MXFP4.elements // 4, heavy=True)
_OF_BF16 = (INT4_BF16, INT4_G32_BF16, Q8_BF16)
CODE_STORAGES = (
    INT4_SYMMETRIC,
    *_OF_BF16,
    INT4,
    INT4_G32,
    Q8,
    FP8_BLOCK,
    FP8_ROWS,
    Q4_1,
    Q5_1,
    IQ4,
    NVFP4,
    Q4_K,
    Q5_K,
    Q6_K,
    K_MIXED,
    MIXED,
)
STORAGES = (BF16, FP8, MXFP4, *CODE_STORAGES)


def storage_named(name: str) -> Storage:
    """Return the format with this name."""
    return next(storage for storage in STORAGES if storage.name == name)


def storage_of(info: TensorInfo) -> Storage:
    """Return the format of a packed weight; SpecbuildError if it has none."""
    for storage in STORAGES:
        if len(info.shape) == 3 and (info.dtype, info.shape[2]) == (
            storage.dtype,
            storage.elements,
        ):
            return storage
    raise SpecbuildError(
        f"a packed weight is {info.dtype} {info.shape}, expected the last axis to be "
        f"{', '.join(f'{s.elements} of {s.dtype}' for s in STORAGES)}; build the engine again"
    )


def weight_tiles(
    weight: TensorInfo, width: int, storage: Storage | None = None
) -> tuple[int, int, Storage]:
    """Return the tiles of 16 rows, blocks of 32 columns and format of a weight for ``width``
    columns.

    Raises SpecbuildError if the weight is packed for tokens of another width.
    """
    storage = storage or storage_of(weight)
    tiles, units, _ = weight.shape
    if width % BLOCK or units != storage.units(width // BLOCK):
        raise SpecbuildError(
            f"a weight has {units} units of {storage.unit_blocks * BLOCK} columns, expected those "
            f"of rows of {width} values; pack it for this model"
        )
    return tiles, width // BLOCK, storage
