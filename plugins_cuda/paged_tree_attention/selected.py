"""PagedTreeAttention with lists of slots: a launch for whole rows, then one for the others."""

from __future__ import annotations

from dataclasses import replace

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Unsupported,
)
from specbuild.plugins_cuda.paged_tree_attention.geometry import ARGUMENTS, Geometry

STAGES = 2

WORKSPACES = ("workspace_arrivals", "workspace_sums", "workspace_values")


def refusal(request: LoweringRequest) -> Unsupported | None:
    """Return why no kernel supports the lists of a request, or None without lists."""
    if "selected" not in request.tensors:
        return None
    if request.phase == "prefill":
        return Unsupported(
            "PagedTreeAttention: no kernel takes lists of slots with the chunks of a prompt: leave "
            "the lists out there."
        )
    window = request.attributes["window"]
    if window:
        return Unsupported(
            f"PagedTreeAttention: selected slots in a layer with a window of {window}, the "
            "CUDA kernels take them in full-attention layers: build for the cpu backend."
        )
    return None


def with_lists(
    request: LoweringRequest, shape: Geometry, plain: Lowering, *, alone: OpLaunch, splits: int
) -> Lowering:
    """Return the launches for rows with lists, derived from those without.

    ``alone`` is the plain launch for rows that do not share keys; the cut of a list is the same. If
    every row is alone, with as many CTAs, the launch for lists also processes whole rows.
    """
    _, lists, held = request.tensors["selected"].shape
    [launch] = plain.launches
    workspaces = WORKSPACES if splits > 1 else (None, None, None)
    constants = (*launch.kernel.constants, ("LISTS", lists))
    whole = replace(
        launch,
        kernel=Kernel("paged_tree_attention", "attend_whole_rows", constants, "whole_rows.cu"),
        arguments=(*ARGUMENTS, *workspaces, held),
        reads_early=False,
    )
    groups = shape.rows * shape.kv_heads
    selected_constants = dict(alone.kernel.constants)
    of_an_sm = int(selected_constants["CTAS_OF_AN_SM"])
    target_ctas = max(1, of_an_sm * request.target.multiprocessors // groups)
    ctas = 1 << (min(target_ctas, splits).bit_length() - 1)
    takes_whole = (
        shape.rows == shape.batch and dict(launch.kernel.constants)["CONTEXT_CTAS"] == ctas
    )
    # Launches with any number of rows share the code.
    overrides = {"CONTEXT_CTAS": ctas, "LISTS": lists, "LAUNCH_ROWS": 1, "SEQUENCE_ROWS": 1,
               "TAKES_WHOLE": int(takes_whole)}  # fmt: skip
    selected_constants |= overrides
    required = int(selected_constants["SHARED_BYTES"])
    chosen = OpLaunch(
        Kernel(
            "paged_tree_attention",
            "attend_selected",
            tuple(selected_constants.items()),
            "selected.cu",
        ),
        grid=(ctas, shape.kv_heads, shape.rows),
        block=alone.block,
        shared_bytes=request.target.requested_shared_bytes(ctas * groups, required),
        arguments=(*ARGUMENTS, *workspaces, shape.batch, held),
    )
    return Lowering((chosen,) if takes_whole else (whole, chosen), plain.workspaces)
