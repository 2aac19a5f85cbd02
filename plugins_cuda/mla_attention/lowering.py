"""MlaAttention on a GPU: the attending launches, and the merge of their splits."""

from __future__ import annotations

from specbuild.plugins_cuda.dispatch import first_rule
from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Tactic,
    Unsupported,
    Workspace,
    require,
)
from specbuild.plugins_cuda.mla_attention.absorbed import (
    absorbed_refusal,
    absorbed_shared_bytes,
    lower_absorbed,
)
from specbuild.plugins_cuda.mla_attention.cut import LatentCut, latent_cut, require_shared
from specbuild.plugins_cuda.mla_attention.dispatch import TABLE, facts_of
from specbuild.plugins_cuda.mla_attention.geometry import PANEL, LatentGeometry, latent_geometry
from specbuild.plugins_cuda.mla_attention.prefill import lower_prefill
from specbuild.plugins_cuda.mla_attention.rebuilt import (
    attend_listed,
    attend_rebuilding,
    attend_whole,
)
from specbuild.plugins_cuda.mla_attention.stored import store_and_attend

PROJECT_THREADS = 256
PROJECT_ROWS = 16

ATTEND = (
    "page_table",
    "row_start",
    "row_slot",
    "tree_start",
    "ancestor_bits",
    "selected",
    "page_position",
    "workspace_sums",
    "workspace_values",
)


def lower(request: LoweringRequest) -> Lowering:
    """Return the launches: attention over the splits, then their merge and the projection to
    values.

    In phase ``decode`` a row's sums do not depend on the grid. In prompt chunks keys and values are
    rebuilt for all rows, followed by plain attention, unless queries are absorbed. If rows have
    lists, the launch for whole rows comes first, and a launch for the others follows; both leave
    the same kind of states.
    """
    shape = latent_geometry(request)
    require(refusal(request))
    facts = facts_of(request, shape)
    form = first_rule(TABLE, facts).form
    if form == "prompt":
        return lower_prefill(request, shape)
    if form in ("absorbed", "absorbed_prompt"):
        limit = request.target.shared_bytes_per_block
        require_shared(shape, absorbed_shared_bytes(shape), limit)
        return lower_absorbed(shape, request.target, ATTEND, prompt=facts.prompt)
    cut = facts.cut
    assert cut is not None
    states = shape.rows * shape.q_heads * cut.places
    panels = -(-shape.value // PANEL)
    tiles = -(-shape.rows * (shape.q_heads // shape.v_heads) // PROJECT_ROWS)
    partials = tiles * shape.v_heads * panels * PROJECT_ROWS * shape.v_width
    attend, keys = _attend(request, shape, cut, form)
    workspaces = (
        Workspace("workspace_sums", 8 * states),
        Workspace("workspace_values", 4 * states * shape.value),
        Workspace("workspace_partials", 4 * partials),
        Workspace("workspace_arrivals", 4 * tiles * shape.v_heads, zeroed=True),
        *keys,
    )
    return Lowering((*attend, _project(shape, cut, panels, tiles)), workspaces)


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Return tiles in flight, rows that share keys, CTAs over the context; the default first."""
    shape = latent_geometry(request)
    if request.phase == "prefill" or not shape.rebuilt or "selected" in request.tensors:
        return ({},)
    if shape.rows == shape.batch:
        return ({}, {"stages": 3}, {"context_ctas": 8})
    alone: tuple[Tactic, ...] = (
        ({"mixers": 1},) if latent_cut(request, shape).consumer_warpgroups > 1 else ()
    )
    return ({}, *alone, {"rows": 1}, {"context_ctas": 8})


def refusal(request: LoweringRequest) -> Unsupported | None:
    """Return the reason why no kernel supports the request, by its phase and its lists."""
    shape = latent_geometry(request)
    prompt = request.phase == "prefill"
    if "selected" in request.tensors:
        if prompt:
            return Unsupported(
                "MlaAttention: no kernel takes lists of slots with the chunks of a prompt: leave "
                "the lists out there."
            )
        if shape.window:
            return Unsupported(
                f"MlaAttention: selected slots in a layer with a window of {shape.window}, the "
                "CUDA kernels take them in full-attention layers: build for the cpu backend."
            )
    if prompt and not shape.rebuilt:
        return absorbed_refusal(shape)
    if facts_of(request, shape).has_prompt_kernel and shape.viewed:
        return Unsupported(
            "MlaAttention: no kernel rebuilds what a prompt's rows see where slots are no "
            "positions (page_position): leave it out there."
        )
    return None


def _attend(
    request: LoweringRequest, shape: LatentGeometry, cut: LatentCut, form: str
) -> tuple[tuple[OpLaunch, ...], tuple[Workspace, ...]]:
    """Return the launches that write the states of splits, and their other workspaces."""
    if form == "rebuilding":
        return (attend_rebuilding(request, shape, cut, ATTEND),), ()
    if form == "stored":
        attend, keys = store_and_attend(request, shape, cut)
        return attend, (keys,)
    listed = attend_listed(request, shape, cut, ATTEND)
    if form == "listed":
        return (attend_whole(request, shape, cut, ATTEND), listed), ()
    attend, keys = store_and_attend(request, shape, cut)
    return (*attend, listed), (keys,)


def _project(shape: LatentGeometry, cut: LatentCut, panels: int, tiles: int) -> OpLaunch:
    constants = (
        ("BATCH", shape.batch),
        ("Q_HEADS", shape.q_heads),
        ("V_HEADS", shape.v_heads),
        ("V_WIDTH", shape.v_width),
        ("VALUE", shape.value),
        ("PANELS", panels),
        ("PLACES", cut.places),
        ("GROUPS", min(cut.groups, cut.places)),
        ("TILE", shape.tile),
        ("WINDOW", shape.window),
        ("HAS_SINKS", int(shape.has_sinks)),
        ("HAS_BIAS", int(shape.has_value_bias)),
    )
    return OpLaunch(
        Kernel("mla_attention", "project_values", constants, file="values.cu"),
        grid=(panels, shape.v_heads, tiles),
        block=PROJECT_THREADS,
        shared_bytes=0,
        arguments=(
            *("w_v", "b_v", "row_start", "row_slot", "sinks", "attended"),
            *("workspace_sums", "workspace_values", "workspace_partials", "workspace_arrivals"),
        ),
    )
