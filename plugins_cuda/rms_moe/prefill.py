"""RmsMoe over a prompt chunk: rows sorted by expert, then grouped tensor-core GEMMs."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.plugins_cuda.launches import (
    Argument,
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Tactic,
    Workspace,
)
from specbuild.plugins_cuda.prefill_gemm import (
    COLUMN_STEP,
    MOST_COLUMNS,
    PACKED_ROWS,
    PAIRS_STAGING,
    ROWS_PER_BLOCK,
    ROWS_STAGING,
    ROWS_THREADS,
    THREADS,
    TILE_ROWS,
    ceil_div,
    panel_bytes,
    panel_count,
    ring_bytes,
    stages_for,
)
from specbuild.plugins_cuda.rms_moe.packing import (
    BLOCK,
    TILE_OUTPUTS,
    down_steps,
    gate_up_steps,
    in_bf16,
)
from specbuild.plugins_cuda.rms_norms import rounding_of
from specbuild.runtime.errors import SpecbuildError

_SORT_THREADS = 1024
_ROUTER_ROWS, _ROUTER_WARPS = 16, 8
_MOST_EXPERTS, _MOST_TOP_K = 256, 8
_TILES_HEADER_INTS, _TILE_INTS = 4, 4
_MEMBERS_OF_8 = 8


@dataclass(frozen=True)
class Layer:
    """Sizes of a request: ``columns`` = tokens of the widest tile, ``panel_rows`` = sorted rows.

    Each expert's rows begin at a multiple of 8, and a tile computes whole steps of 16 columns.
    """

    rows: int
    sequences: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    columns: int
    wgmma: int
    bf16: bool

    @property
    def entries(self) -> int:
        """Chosen experts of all rows."""
        return self.rows * self.top_k

    @property
    def panel_rows(self) -> int:
        """Rows of the panels, whatever the routing."""
        used = min(self.experts, self.entries)
        most = self.entries + (_MEMBERS_OF_8 - 1) * used + COLUMN_STEP
        return ceil_div(most, _MEMBERS_OF_8) * _MEMBERS_OF_8

    @property
    def most_tiles(self) -> int:
        """Tiles of tokens, whatever the routing."""
        return min(self.experts, self.entries) + self.entries // self.columns

    def constants(self, **more: float) -> tuple[tuple[str, int | float], ...]:
        """What kernels are compiled with, and ``more``."""
        return (
            ("EXPERTS", self.experts),
            ("TOP_K", self.top_k),
            ("COLUMNS", self.columns),
            ("BF16", int(self.bf16)),
            *more.items(),
        )


def lower_prefill(request: LoweringRequest) -> Lowering:
    """``x`` [T, H], packed experts, ``row_start`` [B+1] → ``y`` [T, H] for the live rows.

    SpecbuildError where the kernels cannot compute it, or the tactic is unknown.
    """
    layer = _layer(request)
    launches = (
        *_sorting(request, layer),
        _gate_up(request, layer),
        _down(request, layer),
        _combine(request, layer),
    )
    rows_bytes = panel_bytes(layer.hidden // BLOCK, layer.panel_rows)
    tiles_bytes = 4 * (_TILES_HEADER_INTS + _TILE_INTS * layer.most_tiles)
    return Lowering(
        launches,
        (
            Workspace("workspace_logits", 4 * layer.rows * layer.experts),
            Workspace("workspace_chosen", 4 * layer.entries),
            Workspace("workspace_shares", 4 * layer.entries),
            Workspace("workspace_position", 4 * layer.entries),
            Workspace("workspace_tiles", tiles_bytes),
            Workspace("workspace_rows", rows_bytes),
            Workspace("workspace_h", panel_bytes(layer.inner // BLOCK, layer.panel_rows)),
        ),
    )


def prefill_tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Tokens of the widest tile, and whether wgmma computes it."""
    widest = _widest_columns(request.tensors["x"].shape[0])
    narrower = ({"columns": c} for c in (192, 128, 64) if c < widest)
    return ({"columns": widest}, *narrower, {"columns": widest, "wgmma": 0})


def _widest_columns(rows: int) -> int:
    return min(MOST_COLUMNS, ceil_div(rows, COLUMN_STEP) * COLUMN_STEP)


def _layer(request: LoweringRequest) -> Layer:
    tensors, attributes = request.tensors, request.attributes
    rows, hidden = tensors["x"].shape
    experts, two_inner = tensors["gate_up_bias"].shape
    layer = Layer(
        rows=rows,
        sequences=tensors["row_start"].shape[0] - 1,
        hidden=hidden,
        inner=two_inner // 2,
        experts=experts,
        top_k=int(attributes["top_k"]),
        columns=request.tactic.get("columns", _widest_columns(rows)),
        wgmma=request.tactic.get("wgmma", 1),
        bf16=in_bf16(tensors["gate_up"].dtype),
    )
    if attributes["gating"] != "softmax_selected":
        raise SpecbuildError(
            f"RmsMoe got gating {attributes['gating']!r}, its CUDA kernels know only "
            "'softmax_selected': build this model for the CPU."
        )
    if hidden % BLOCK or layer.inner % BLOCK or experts > _MOST_EXPERTS:
        raise SpecbuildError(
            f"RmsMoe got hidden {hidden}, inner {layer.inner} and {experts} experts, expected "
            f"widths that are multiples of {BLOCK} and at most {_MOST_EXPERTS} experts: build this "
            "model for the CPU."
        )
    if not 1 <= layer.top_k <= min(_MOST_TOP_K, experts):
        raise SpecbuildError(
            f"RmsMoe got top {layer.top_k} of {experts} experts, expected 1 to "
            f"{min(_MOST_TOP_K, experts)}: build this model for the CPU."
        )
    if layer.columns % COLUMN_STEP or not COLUMN_STEP <= layer.columns <= MOST_COLUMNS:
        raise SpecbuildError(
            f"RmsMoe's tactic has tiles of {layer.columns} tokens, expected a multiple of "
            f"{COLUMN_STEP} up to {MOST_COLUMNS}: tune again."
        )
    return layer


def _kernel(
    entry: str, constants: tuple[tuple[str, int | float], ...], file: str = "prefill.cu"
) -> Kernel:
    # Sorting is one CTA's work of a few microseconds a chunk: what it spills does not show.
    return Kernel("rms_moe", entry, constants, file, hot=entry != "moe_sort")


def _row_constants(request: LoweringRequest, layer: Layer) -> tuple[tuple[str, int | float], ...]:
    return layer.constants(
        K_BLOCKS=layer.hidden // BLOCK,
        SEQUENCES=layer.sequences,
        CAST_FIRST=int(rounding_of("RmsMoe", request.attributes) == "llama"),
        EPS=float(request.attributes["eps"]),
        SHARED_BYTES=_router_bytes(layer),
    )


def _router_bytes(layer: Layer) -> int:
    """16 rows with 8 values between them, and the logits of every slice of hidden."""
    tiles = ceil_div(layer.experts, PACKED_ROWS)
    slices = 1 if tiles >= _ROUTER_WARPS else _ROUTER_WARPS // tiles
    sums = 4 * slices * _ROUTER_ROWS * PACKED_ROWS * tiles
    return 2 * _ROUTER_ROWS * (layer.hidden + 8) + sums


def _sorting(request: LoweringRequest, layer: Layer) -> tuple[OpLaunch, ...]:
    constants = _row_constants(request, layer)
    route = OpLaunch(
        _kernel("moe_route", constants),
        grid=(ceil_div(layer.rows, _ROUTER_ROWS), 1, 1),
        block=ROWS_THREADS,
        shared_bytes=_router_bytes(layer),
        arguments=(
            *("x", "norm", "router_weight", "router_bias", "row_start"),
            *("workspace_logits", "workspace_chosen", "workspace_shares"),
        ),
    )
    sort = OpLaunch(
        _kernel("moe_sort", constants),
        grid=(1, 1, 1),
        block=_SORT_THREADS,
        shared_bytes=0,
        arguments=("row_start", "workspace_chosen", "workspace_position", "workspace_tiles"),
    )
    gather = OpLaunch(
        _kernel("moe_gather", constants),
        grid=(ceil_div(layer.rows, ROWS_PER_BLOCK), 1, 1),
        block=ROWS_THREADS,
        shared_bytes=0,
        arguments=(
            *("x", "norm", "row_start", "workspace_position", "workspace_rows"),
            layer.panel_rows,
        ),
    )
    return route, sort, gather


def _gemm(
    request: LoweringRequest,
    name: str,
    constants: tuple[tuple[str, int | float], ...],
    shared_bytes: int,
    tiles: int,
    arguments: tuple[Argument, ...],
) -> OpLaunch:
    return OpLaunch(
        _kernel(
            f"moe_{name}",
            (*constants, ("SHARED_BYTES", shared_bytes)),
            f"prefill_{name}.cu",
        ),
        grid=(min(tiles, request.target.multiprocessors), 1, 1),
        block=THREADS,
        shared_bytes=shared_bytes,
        arguments=arguments,
    )


def _gate_up(request: LoweringRequest, layer: Layer) -> OpLaunch:
    stages = stages_for(layer.columns, PAIRS_STAGING)
    constants = layer.constants(
        K_BLOCKS=layer.hidden // BLOCK,
        ROW_TILES=layer.inner // TILE_OUTPUTS,
        STEPS=gate_up_steps(layer.hidden),
        STAGES=stages,
        MOST_TILES=layer.most_tiles,
        WGMMA=layer.wgmma,
        CLAMPED=int(request.attributes["activation"] == "swiglu_clamped"),
        ALPHA=float(request.attributes["alpha"]),
        LIMIT=float(request.attributes["limit"]),
    )
    return _gemm(
        request,
        "gate_up",
        constants,
        ring_bytes(layer.columns, PAIRS_STAGING, stages),
        layer.most_tiles * panel_count(layer.inner // BLOCK),
        (
            *("gate_up", "gate_up_bias", "workspace_tiles", "workspace_rows", "workspace_h"),
            layer.panel_rows,
        ),
    )


def _down(request: LoweringRequest, layer: Layer) -> OpLaunch:
    stages = stages_for(layer.columns, ROWS_STAGING)
    constants = layer.constants(
        K_BLOCKS=layer.inner // BLOCK,
        ROW_TILES=layer.hidden // PACKED_ROWS,
        STEPS=down_steps(layer.inner),
        STAGES=stages,
        MOST_TILES=layer.most_tiles,
        WGMMA=layer.wgmma,
    )
    return _gemm(
        request,
        "down",
        constants,
        ring_bytes(layer.columns, ROWS_STAGING, stages),
        layer.most_tiles * ceil_div(layer.hidden, TILE_ROWS),
        (
            *("down", "down_bias", "workspace_tiles", "workspace_rows", "workspace_h"),
            layer.panel_rows,
        ),
    )


def _combine(request: LoweringRequest, layer: Layer) -> OpLaunch:
    return OpLaunch(
        _kernel("moe_combine", _row_constants(request, layer)),
        grid=(ceil_div(layer.rows * layer.hidden // 8, ROWS_THREADS), 1, 1),
        block=ROWS_THREADS,
        shared_bytes=0,
        arguments=(
            *("x", "row_start", "y", "workspace_shares", "workspace_position"),
            "workspace_rows",
        ),
    )
