"""The sizes of a launch of attention, and what its kernels refuse."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.plugins_cuda.launches import LoweringRequest
from specbuild.runtime.errors import SpecbuildError

WIDTHS = (16, 32, 64, 80, 96, 128, 256, 512)
WIDEST_OF_MANY = 128  # wider heads have one kernel for all steps (wide_heads.cu)
CODED_WIDTHS = (32, 64, 96, 128)  # of quantized keys: two steps of 16 columns at once
WGMMA_WIDTHS = (64, 128)  # head widths of the wgmma kernels of steps; that of prompts takes 256
WIDE = 64  # with wider heads, registers hold half the rows and shared memory half the tiles
MAX_GROUP = 16
# Of the decode kernels: keys of a tile, heads in half an mma, bytes of a flag in shared memory.
TILE_KEYS, HEADS, FLAG_BYTES = 32, 8, 16

# The arguments of every entry point; with splits, workspaces follow.
ARGUMENTS = (
    "q",
    "k_pool",
    "v_pool",
    "page_table",
    "row_start",
    "row_slot",
    "tree_start",
    "ancestor_bits",
    "sinks",
    "selected",
    "attended",
)


def tile_row_bytes(head_bytes: int) -> int:
    """Return the stride of rows of a tile.

    If the heads are no power of two, it is an odd number of 16-byte units, to avoid bank conflicts
    (_device/attention_tile.cuh).
    """
    units = head_bytes // 16
    return 16 * (units if units & (units - 1) == 0 else units | 1)


def tile_bytes(shape: Geometry, *, teams: int, stages: int, rows: int, row_warps: int) -> int:
    """Return the first part of a CTA's shared memory: rings, and with several rows tree and
    queries.

    ``rows`` are those of a warp, ``row_warps`` the warps of a team.
    """
    row = tile_row_bytes(shape.head_bytes)
    ring = teams * stages * 2 * TILE_KEYS * row
    if rows * row_warps == 1:
        return ring
    tail = 2 * TILE_KEYS * (1 + shape.words) * row
    queries = row_warps * shape.mmas(rows) * 2 * HEADS * tile_row_bytes(2 * shape.width)
    return ring + tail + queries


@dataclass(frozen=True)
class Geometry:
    """The sizes of one launch; ``group`` query heads share a KV head.

    If a KV head has more query heads than half an mma holds, it counts as several here, which read
    the same keys: ``share`` of ``kv_heads`` are one KV head of the pools. ``uneven``: one of
    several sequences may have most rows (if SpecPV re-verifies tokens). ``codes``: keys and values
    are e4m3, a byte each (kv_write/codes.py).
    """

    rows: int
    batch: int
    kv_heads: int
    group: int
    width: int
    page_size: int
    views: int
    table: int
    words: int
    window: int
    scale: float
    has_sinks: bool
    uneven: bool = False
    share: int = 1
    codes: bool = False

    @property
    def head_bytes(self) -> int:
        """Bytes of a key, or of a value, in the pools."""
        return self.width if self.codes else 2 * self.width

    @property
    def takes_wgmma(self) -> bool:
        """Whether wgmma can read these keys and values; quantized ones are no operands."""
        return self.width in WGMMA_WIDTHS and not self.codes

    @property
    def max_rows(self) -> int:
        """The rows of a sequence for the dispatch: all if ``uneven``, else the mean."""
        return self.rows if self.uneven else -(-self.rows // self.batch)

    @property
    def mma_rows(self) -> int:
        """Rows of the launch in the 16 of an mma, each with 4 or 8 heads, if a warp has several
        rows.

        See device/mma_rows.cuh.
        """
        return 4 if self.group <= 4 else 2

    def mmas(self, rows: int) -> int:
        """Return the m16 tiles of ``rows`` rows."""
        return -(-rows // self.mma_rows)

    def halves(self, rows: int) -> int:
        """Return the used halves of the m16 tiles of ``rows`` rows; a half may hold two rows."""
        return 1 if rows <= max(1, self.mma_rows // 2) else 2 * self.mmas(rows)

    @property
    def capacity(self) -> int:
        """View slots of a sequence."""
        return self.table * self.page_size

    def constants(self) -> tuple[tuple[str, int | float], ...]:
        """Return the compile-time constants."""
        return (
            ("KV_HEADS", self.kv_heads),
            ("SHARE", self.share),
            ("GROUP", self.group),
            ("WIDTH", self.width),
            ("CODES", int(self.codes)),
            ("PAGE_SIZE", self.page_size),
            ("VIEWS", self.views),
            ("TABLE", self.table),
            ("WORDS", self.words),
            ("WINDOW", self.window),
            ("SCALE", self.scale),
            ("HAS_SINKS", int(self.has_sinks)),
        )


def geometry_of(request: LoweringRequest) -> Geometry:
    """Return the sizes of a request; SpecbuildError for unsupported requests."""
    tensors = request.tensors
    rows, q_heads, width = tensors["q"].shape
    _, kv_heads, page_size, v_width = tensors["v_pool"].shape
    batch, views, table = tensors["page_table"].shape
    scale = float(request.attributes["scale"])
    dtypes = tuple(tensors[name].dtype for name in ("q", "k_pool", "v_pool"))
    codes = dtypes == ("bfloat16", "uint8", "uint8")
    if not codes and set(dtypes) != {"bfloat16"}:
        raise SpecbuildError(
            f"PagedTreeAttention: q, k_pool and v_pool are {', '.join(dtypes)}, expected bfloat16, "
            "or uint8 (e4m3) for both pools; build the engine in bfloat16"
        )
    widths = CODED_WIDTHS if codes else WIDTHS
    if width != v_width or width not in widths:
        raise SpecbuildError(
            f"PagedTreeAttention: got keys of width {width} and values of {v_width}, expected "
            f"equal widths of {widths}{' for a cache in fp8' * codes}; build for the cpu backend"
        )
    if q_heads % kv_heads or q_heads // kv_heads > MAX_GROUP:
        raise SpecbuildError(
            f"PagedTreeAttention: got {q_heads} query heads and {kv_heads} KV heads, expected at "
            f"most {MAX_GROUP} query heads per KV head; build for the cpu backend"
        )
    if scale <= 0:
        raise SpecbuildError(
            f"PagedTreeAttention: got scale {scale}, expected a positive one; check the model's "
            "config"
        )
    group = q_heads // kv_heads
    share = next(n for n in range(1, group + 1) if group % n == 0 and group // n <= HEADS)
    return Geometry(
        rows=rows,
        batch=batch,
        kv_heads=kv_heads * share,
        share=share,
        group=group // share,
        width=width,
        page_size=page_size,
        views=views,
        table=table,
        words=tensors["ancestor_bits"].shape[1],
        window=int(request.attributes["window"]),
        scale=scale,
        has_sinks="sinks" in tensors,
        uneven=request.uneven,
        codes=codes,
    )
