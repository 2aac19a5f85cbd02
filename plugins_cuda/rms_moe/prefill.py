"""RmsMoe of a prompt chunk: rows sorted by expert, then grouped tensor-core GEMMs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Tactic,
    Workspace,
)
from specbuild.plugins_cuda.linear.storage import MXFP4
from specbuild.plugins_cuda.prefill_gemm import (
    COLUMN_STEP,
    MAX_COLUMNS,
    PACKED_ROWS,
    PAIRS_STAGING,
    ROWS_PER_BLOCK,
    ROWS_STAGING,
    ROWS_THREADS,
    THREADS,
    TILE_ROWS,
    ceil_div,
    panel_bytes,
    ring_bytes,
    stages_for,
)
from specbuild.plugins_cuda.rms_moe.choice import choice_of, router_parts
from specbuild.plugins_cuda.rms_moe.expert_codes import expert_storages
from specbuild.plugins_cuda.rms_moe.packing import (
    BLOCK,
    TILE_OUTPUTS,
    down_steps,
    gate_up_steps,
)
from specbuild.plugins_cuda.rms_moe.prefill_few import (
    CHUNK_STEPS,
    FEW_TILES,
    FEWEST_ROWS,
    lay_out_rings,
)
from specbuild.plugins_cuda.rms_moe.prefill_few import MAX_COLUMNS as FEW_COLUMNS
from specbuild.plugins_cuda.rms_moe.prefill_few import WARPS as FEW_WARPS
from specbuild.plugins_cuda.rms_norms import rounding_code, rounding_of
from specbuild.runtime.errors import SpecbuildError

# The index is the number in kernels (device/gated.cuh).
ACTIVATIONS = ("swiglu", "swiglu_clamped", "geglu_tanh")
_SORT_THREADS = 1024
_ROUTER_WARPS = 8
# The rows of a routing CTA; the first number whose shared memory fits.
_ROUTER_ROWS = (16, 8)
_MAX_ROUTER_BYTES = 227 * 1024
_MAX_ROWS = 1 << 16
_TILES_HEADER_INTS, _TILE_INTS = 4, 4
_MEMBERS_OF_8 = 8


@dataclass(frozen=True)
class Layer:
    """Sizes of a request: ``columns`` = tokens of the widest tile, ``panel_rows`` = sorted rows.

    The rows of each expert start at a multiple of 8, and a tile has whole steps of 16 columns.
    ``few``: the warps of a CTA of the variant for few rows per expert, else 0.
    """

    rows: int
    sequences: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    columns: int
    wgmma: int
    few: int

    @property
    def entries(self) -> int:
        """Return the number of selected experts of all rows."""
        return self.rows * self.top_k

    @property
    def panel_rows(self) -> int:
        """Return the rows of panels for any routing."""
        used = min(self.experts, self.entries)
        most = self.entries + (_MEMBERS_OF_8 - 1) * used + COLUMN_STEP
        return ceil_div(most, _MEMBERS_OF_8) * _MEMBERS_OF_8

    @property
    def most_tiles(self) -> int:
        """Return the maximum number of token tiles for any routing."""
        return min(self.experts, self.entries) + self.entries // self.columns

    def constants(self, **more: float) -> tuple[tuple[str, int | float], ...]:
        """Return the constants of all kernels, and ``more``."""
        return (
            ("EXPERTS", self.experts),
            ("TOP_K", self.top_k),
            ("COLUMNS", self.columns),
            *more.items(),
        )


def lower_prefill(request: LoweringRequest) -> Lowering:
    """Return the launches: ``x`` [T, H], packed experts, ``row_start`` [B+1] → ``y`` [T, H].

    Only live rows of ``y`` are written. Raises SpecbuildError for unsupported requests and tactics.
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
            Workspace("workspace_logits", choice_of(request).logits_bytes(layer.rows)),
            Workspace("workspace_chosen", 4 * layer.entries),
            Workspace("workspace_shares", 4 * layer.entries),
            Workspace("workspace_position", 4 * layer.entries),
            Workspace("workspace_tiles", tiles_bytes),
            Workspace("workspace_rows", rows_bytes),
            Workspace("workspace_h", panel_bytes(layer.inner // BLOCK, layer.panel_rows)),
        ),
    )


def activation_code(attributes: Mapping[str, Any]) -> int:
    """Return the number of the activation in kernels; SpecbuildError if no kernel computes it."""
    activation = str(attributes["activation"])
    if activation not in ACTIVATIONS:
        raise SpecbuildError(
            f"RmsMoe got activation {activation!r}, its CUDA kernels know "
            f"{', '.join(ACTIVATIONS)}: build this model for the CPU."
        )
    return ACTIVATIONS.index(activation)


def prefill_tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Return the tactics: tokens of the widest tile, use of wgmma, and the form for few rows."""
    widest = _widest_columns(request.tensors["x"].shape[0])
    few: list[dict[str, int]] = []
    if _in_mxfp4(request):
        tiles = ((32, 16), *FEW_TILES.values())
        few = [{"columns": c, "few": warps} for c, warps in tiles if c <= widest]
    many = [{"columns": c} for c in (widest, 192, 128, 64) if c <= widest]
    default = _default_tactic(request)
    others = [*few, *many, {"columns": widest, "wgmma": 0}]
    return (default, *(t for i, t in enumerate(others) if t != default and t not in others[:i]))


def _default_tactic(request: LoweringRequest) -> dict[str, int]:
    """Return the form for few rows an expert if there are few, with tiles that fit most experts."""
    rows = request.tensors["x"].shape[0]
    widest = _widest_columns(rows)
    if _in_mxfp4(request):
        of_an_expert = choice_of(request).rows_of_an_expert(rows)
        for most, (columns, warps) in FEW_TILES.items():
            if FEWEST_ROWS <= of_an_expert <= most and columns <= widest:
                return {"columns": columns, "few": warps}
    return {"columns": widest}


def _in_mxfp4(request: LoweringRequest) -> bool:
    """Return whether all experts are MXFP4, the only storage of the form for few rows an expert."""
    return set(expert_storages(request).values()) == {MXFP4}


def _widest_columns(rows: int) -> int:
    return min(MAX_COLUMNS, ceil_div(rows, COLUMN_STEP) * COLUMN_STEP)


def _layer(request: LoweringRequest) -> Layer:
    tensors = request.tensors
    tactic = request.tactic or _default_tactic(request)
    rows, hidden = tensors["x"].shape
    experts, two_inner = tensors["gate_up_bias"].shape
    choice = choice_of(request)
    layer = Layer(
        rows=rows,
        sequences=tensors["row_start"].shape[0] - 1,
        hidden=hidden,
        inner=two_inner // 2,
        experts=experts,
        top_k=choice.of_a_row,
        columns=tactic.get("columns", _widest_columns(rows)),
        wgmma=tactic.get("wgmma", 1),
        few=tactic.get("few", 0),
    )
    if hidden % BLOCK or layer.inner % BLOCK or layer.rows >= _MAX_ROWS:
        raise SpecbuildError(
            f"RmsMoe got hidden {hidden}, inner {layer.inner} and {layer.rows} rows, expected "
            f"widths that are multiples of {BLOCK} and fewer than {_MAX_ROWS} rows: build this "
            "model for the CPU, or with smaller chunks."
        )
    _check_tiles(request, layer)
    return layer


def _check_tiles(request: LoweringRequest, layer: Layer) -> None:
    most = FEW_COLUMNS if layer.few else MAX_COLUMNS
    if layer.columns % COLUMN_STEP or not COLUMN_STEP <= layer.columns <= most:
        raise SpecbuildError(
            f"RmsMoe's tactic has tiles of {layer.columns} tokens, expected a multiple of "
            f"{COLUMN_STEP} up to {most}: tune again."
        )
    if layer.few and not (_in_mxfp4(request) and layer.few in FEW_WARPS):
        raise SpecbuildError(
            f"RmsMoe's tactic has {layer.few} warps for few rows an expert, expected one of "
            f"{FEW_WARPS} and experts in MXFP4: tune again."
        )


def _kernel(
    entry: str, constants: tuple[tuple[str, int | float], ...], file: str = "prefill.cu"
) -> Kernel:
    # One CTA sorts, a few microseconds per chunk, so its spills have no measurable cost.
    return Kernel("rms_moe", entry, constants, file, hot=entry != "moe_sort")


def _row_constants(request: LoweringRequest, layer: Layer) -> tuple[tuple[str, int | float], ...]:
    choice = choice_of(request)
    of_choice = dict((*choice.of_router(layer.rows), *choice.of_experts(layer.rows)))
    rows = _router_rows(layer, choice.router_rows)
    return layer.constants(
        K_BLOCKS=layer.hidden // BLOCK,
        SEQUENCES=layer.sequences,
        NORM_ROUNDING=rounding_code(rounding_of("RmsMoe", request.attributes)),
        EPS=float(request.attributes["eps"]),
        ROUTER_NORM=int("router_norm" in request.tensors),
        RESIDUAL=int(request.attributes["residual"]),
        ROUTER_ROWS=rows,
        SHARED_BYTES=_router_bytes(layer, choice.router_rows, rows),
        **of_choice,
    )


def _router_rows(layer: Layer, outputs: int) -> int:
    """Return the rows of a routing CTA; SpecbuildError if no number fits."""
    for rows in _ROUTER_ROWS:
        if _router_bytes(layer, outputs, rows) <= _MAX_ROUTER_BYTES:
            return rows
    raise SpecbuildError(
        f"RmsMoe got hidden {layer.hidden}, of which {_ROUTER_ROWS[-1]} rows do not fit shared "
        "memory: build this model for the CPU."
    )


def _router_bytes(layer: Layer, outputs: int, rows: int) -> int:
    """Return the shared memory of ``rows``, 8 values apart, and the logits of every slice."""
    tiles = ceil_div(outputs, PACKED_ROWS)
    slices = 1 if tiles >= _ROUTER_WARPS else _ROUTER_WARPS // tiles
    sums = 4 * slices * rows * PACKED_ROWS * tiles
    return 2 * rows * (layer.hidden + 8) + sums


def _sorting(request: LoweringRequest, layer: Layer) -> tuple[OpLaunch, ...]:
    constants, choice = _row_constants(request, layer), choice_of(request)
    rows = _router_rows(layer, choice.router_rows)
    parts = router_parts(request)
    entry, file = (
        ("moe_route_with_parts", "prefill_with_parts.cu") if parts else ("moe_route", "prefill.cu")
    )
    route = OpLaunch(
        _kernel(entry, constants, file),
        grid=(ceil_div(layer.rows, rows), 1, 1),
        block=ROWS_THREADS,
        shared_bytes=_router_bytes(layer, choice.router_rows, rows),
        arguments=(
            *("x", "norm", "router_weight", "router_bias", "row_start"),
            *parts,
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


@dataclass(frozen=True)
class Product:
    """A grouped GEMM of [experts, 16·row_tiles, 32·blocks].

    ``staging``: PAIRS_STAGING or ROWS_STAGING. ``warp_tiles``: the packed tiles of 16 rows.
    ``steps``: the steps of a packed tile.
    """

    name: str
    blocks: int
    row_tiles: int
    steps: int
    staging: int
    warp_tiles: int


def _gemm(
    request: LoweringRequest,
    layer: Layer,
    product: Product,
    constants: tuple[tuple[str, int | float], ...] = (),
) -> OpLaunch:
    name, rows, threads = product.name, TILE_ROWS, THREADS
    stages = stages_for(layer.columns, product.staging)
    shared_bytes = ring_bytes(layer.columns, product.staging, stages)
    if layer.few:
        name, rows, threads = f"few_{name}", PACKED_ROWS * layer.few, 32 * (layer.few + 2)
        rings = lay_out_rings(layer.columns, product.staging, layer.few, product.warp_tiles)
        stages, shared_bytes = rings.stages, rings.shared_bytes
        constants = (
            *(("WARPS", layer.few), ("CHUNK_STEPS", CHUNK_STEPS), ("CHUNKS", rings.chunks)),
            *(("WARP_TILES", product.warp_tiles), *constants),
        )
    sizes = layer.constants(
        K_BLOCKS=product.blocks,
        ROW_TILES=product.row_tiles,
        STEPS=product.steps,
        STAGES=stages,
        MAX_TILES=layer.most_tiles,
        WGMMA=layer.wgmma,
        WEIGHTS=expert_storages(request)[product.name].code,
    )
    constants = (*sizes, *constants, ("SHARED_BYTES", shared_bytes))
    tiles = layer.most_tiles * ceil_div(product.row_tiles * PACKED_ROWS, rows)
    weights = (product.name, f"{product.name}_bias")
    return OpLaunch(
        _kernel(f"moe_{name}", constants, f"prefill_{name}.cu"),
        grid=(min(tiles, request.target.multiprocessors), 1, 1),
        block=threads,
        shared_bytes=shared_bytes,
        arguments=(
            *(*weights, "workspace_tiles", "workspace_rows", "workspace_h"),
            layer.panel_rows,
        ),
    )


def _gate_up(request: LoweringRequest, layer: Layer) -> OpLaunch:
    product = Product(
        name="gate_up",
        blocks=layer.hidden // BLOCK,
        row_tiles=layer.inner // TILE_OUTPUTS,
        steps=gate_up_steps(layer.hidden),
        staging=PAIRS_STAGING,
        warp_tiles=1,
    )
    activation = (
        ("ACTIVATION", activation_code(request.attributes)),
        ("ALPHA", float(request.attributes["alpha"])),
        ("LIMIT", float(request.attributes["limit"])),
    )
    return _gemm(request, layer, product, activation)


def _down(request: LoweringRequest, layer: Layer) -> OpLaunch:
    product = Product(
        name="down",
        blocks=layer.inner // BLOCK,
        row_tiles=layer.hidden // PACKED_ROWS,
        steps=down_steps(layer.inner),
        staging=ROWS_STAGING,
        warp_tiles=2,
    )
    return _gemm(request, layer, product)


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
