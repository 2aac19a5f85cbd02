"""The sizes of a launch of latent attention, and what its kernels refuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.runtime.errors import SpecbuildError

ENTRY_STEP = 16
WIDTHS = (16, 32, 64)
VALUE_WIDTHS = (16, 32, 64, 128)
# With absorbed queries; the kernel processes weights of 128 columns at a time.
ABSORBED_VALUE_WIDTHS = (*VALUE_WIDTHS, 256)
MAX_GROUP = 8
MAX_REBUILT = 768
MAX_ABSORBED = 576
MAX_ABSORBED_VALUE = 512
CTA_FEATURES = 128
ABSORBED_HEADS = 64
# The widest latent whose part of w_k fits in a CTA's registers; the rest is in shared memory.
MAX_HELD = 512
MAX_HELD_STEPS = MAX_HELD // ENTRY_STEP
# The constants of a kernel that rebuilds for all rows at once, without splits and rows.
UNCUT = (("SPLIT", 1), ("GROUPS", 1), ("CONTEXT_CTAS", 1), ("ROWS", 1))
KEY_THREADS = 256
PANEL = 64
ABSORBED_TILE, REBUILT_TILE = 64, 32
# Registers of a thread for sums of latents.
MAX_SUMS = 128


@dataclass(frozen=True)
class LatentGeometry:
    """The sizes of one launch; ``rebuilt`` keys have ``kv_heads`` heads of ``width``.

    ``entry`` values of a token are cached, of which ``value`` are summed. ``positions`` is the
    length of the rotary tables, 0 with absorbed queries. ``tile`` is the number of positions of a
    tile. It is a constant of the layer, because the order of a row's sums depends on it.
    """

    rows: int
    batch: int
    rebuilt: bool
    q_heads: int
    kv_heads: int
    v_heads: int
    width: int
    v_width: int
    entry: int
    value: int
    page_size: int
    pages: int
    table: int
    words: int
    positions: int
    tile: int
    window: int
    scale: float
    has_sinks: bool
    has_key_bias: bool
    has_value_bias: bool
    has_lists: bool
    viewed: bool

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def capacity(self) -> int:
        """View slots of a sequence."""
        return self.table * self.page_size

    @property
    def head_groups(self) -> int:
        """CTAs that read the same latents: each has 128 features of keys, or 64 heads."""
        if self.rebuilt:
            return -(-self.kv_heads * self.width // CTA_FEATURES)
        return -(-self.q_heads // ABSORBED_HEADS)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a tile of latents in shared memory."""
        return -(-self.entry // PANEL) * PANEL * self.tile * 2

    @property
    def table_bytes(self) -> int:
        """Bytes of a tile's cosines and sines."""
        return self.tile * (self.width + 4) * 4

    def sums_held(self, rows: int) -> int:
        """Return a thread's registers for sums of latents, in a CTA of ``rows`` rows."""
        m_tiles = -(-rows * CTA_FEATURES // self.width * 8 // 16)
        return m_tiles * -(-self.value // PANEL) * 8

    def held_steps(self, rows: int) -> int:
        """Return the steps of 16 values whose weights a CTA of ``rows`` rows keeps in registers.

        The attending warpgroup needs more registers if rows have lists, or for an incomplete panel.
        """
        if rows == 1:
            return 24 if self.has_lists or self.entry != MAX_HELD else 32
        return 18 if MAX_HELD - PANEL < self.entry < MAX_HELD else 20

    def waiting_bytes(self, held_steps: int) -> int:
        """Return the bytes of weights in shared memory."""
        steps = self.entry // ENTRY_STEP - held_steps
        return max(0, steps) * KEY_THREADS * 16

    def walk_constants(self) -> tuple[tuple[str, int | float], ...]:
        """Return the constants of all kernels that read the pool."""
        return (
            ("ENTRY", self.entry),
            ("TILE", self.tile),
            ("PAGE_SIZE", self.page_size),
            ("TABLE", self.table),
            ("WORDS", self.words),
            ("WINDOW", self.window),
        )

    def key_constants(self, held_steps: int) -> tuple[tuple[str, int | float], ...]:
        """Return the constants of kernels that rebuild keys, with ``held_steps`` in registers."""
        return (
            ("HELD", held_steps),
            ("KV_HEADS", self.kv_heads),
            ("WIDTH", self.width),
            ("POSITIONS", self.positions),
            ("HAS_BIAS", int(self.has_key_bias)),
            ("VIEWED", int(self.viewed)),
        )


def latent_geometry(request: LoweringRequest) -> LatentGeometry:
    """Return the sizes of a request; SpecbuildError for unsupported requests."""
    tensors = request.tensors
    rows, q_heads, width = tensors["q"].shape
    pages, _, page_size, entry = tensors["c_pool"].shape
    value, v_heads, v_width = tensors["w_v"].shape
    batch, _, table = tensors["page_table"].shape
    rebuilt = "w_k" in tensors
    shape = LatentGeometry(
        rows=rows,
        batch=batch,
        rebuilt=rebuilt,
        q_heads=q_heads,
        kv_heads=tensors["w_k"].shape[1] if rebuilt else 1,
        v_heads=v_heads,
        width=width,
        v_width=v_width,
        entry=entry,
        value=value,
        page_size=page_size,
        pages=pages,
        table=table,
        words=tensors["ancestor_bits"].shape[1],
        positions=tensors["cos"].shape[0] if rebuilt else 0,
        tile=REBUILT_TILE if rebuilt else ABSORBED_TILE,
        window=int(request.attributes["window"]),
        scale=float(request.attributes["scale"]),
        has_sinks="sinks" in tensors,
        has_key_bias="b_k" in tensors,
        has_value_bias="b_v" in tensors,
        has_lists="selected" in tensors,
        viewed="page_position" in tensors,
    )
    _refuse_inputs(tensors)
    _refuse_sizes(shape)
    return shape


def _refuse_inputs(tensors: Mapping[str, TensorInfo]) -> None:
    if "selected" in tensors and "w_k" not in tensors:
        raise SpecbuildError(
            "MlaAttention: got selected slots (DSA) with absorbed queries, which the CUDA kernels "
            "support with rebuilt keys only; build for the cpu backend"
        )
    dtypes = {name: tensors[name].dtype for name in ("q", "c_pool", "w_v")}
    if set(dtypes.values()) != {"bfloat16"}:
        raise SpecbuildError(
            f"MlaAttention: got {dtypes}, expected bfloat16; build the engine in bfloat16"
        )


def _refuse_sizes(shape: LatentGeometry) -> None:
    max_entry = MAX_REBUILT if shape.rebuilt else MAX_ABSORBED
    steps = (shape.entry, shape.value)
    if shape.entry > max_entry or any(size % ENTRY_STEP for size in steps):
        raise SpecbuildError(
            f"MlaAttention: got cache entries of {shape.entry} values, {shape.value} of them "
            f"summed, expected multiples of {ENTRY_STEP} up to {max_entry}; build for the cpu "
            "backend"
        )
    if not shape.rebuilt and shape.value > MAX_ABSORBED_VALUE:
        raise SpecbuildError(
            f"MlaAttention: got {shape.value} summed values with absorbed queries, expected at "
            f"most {MAX_ABSORBED_VALUE}; build for the cpu backend"
        )
    if shape.rebuilt and (shape.width not in WIDTHS or shape.group > MAX_GROUP):
        raise SpecbuildError(
            f"MlaAttention: got heads of {shape.width} and {shape.group} per KV head, expected "
            f"widths of {WIDTHS} and at most {MAX_GROUP} per KV head; build for the cpu "
            "backend"
        )
    if shape.rebuilt and shape.sums_held(1) > MAX_SUMS:
        raise SpecbuildError(
            f"MlaAttention: sums of {shape.value} values for heads of {shape.width} do not fit in "
            "registers; build for the cpu backend"
        )
    widths = VALUE_WIDTHS if shape.rebuilt else ABSORBED_VALUE_WIDTHS
    if shape.v_width not in widths or shape.q_heads % shape.v_heads:
        raise SpecbuildError(
            f"MlaAttention: got {shape.v_heads} value heads of {shape.v_width} for {shape.q_heads} "
            f"query heads, expected widths of {widths} and query heads in a multiple of the value "
            "heads; build for the cpu backend"
        )
    if shape.scale <= 0:
        raise SpecbuildError(
            f"MlaAttention: got scale {shape.scale}, expected a positive one; check the model's "
            "config"
        )
