"""The launches of TopLogprobs."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Workspace,
)

_THREADS = 512
_LOGITS_OF_A_PART = 8192
_BEST, _SUMS = "workspace_best", "workspace_sums"


def lower(request: LoweringRequest) -> Lowering:
    """Return two launches: a CTA per 8192 logits of a row, then a CTA per row.

    CTAs of sequences that change nothing and request no top tokens return at once.
    """
    rows, vocab = request.tensors["logits"].shape
    (batch,) = request.tensors["changes"].shape
    nodes = rows // batch
    max_top = int(request.attributes["most"])
    parts = -(-vocab // _LOGITS_OF_A_PART)
    listed = OpLaunch(
        kernel=Kernel("top_logprobs", "list_parts"),
        grid=(parts, rows, 1),
        block=_THREADS,
        shared_bytes=0,
        arguments=(
            "logits", "raw", "changes", "forced", "top_count", "row_start", _BEST, _SUMS, vocab,
            max_top, nodes, batch,
        ),
    )  # fmt: skip
    joined = OpLaunch(
        kernel=Kernel("top_logprobs", "join_parts"),
        grid=(rows, 1, 1),
        block=_THREADS,
        shared_bytes=0,
        arguments=(
            "logits", "raw", "choice", "chosen_logprob", "changes", "forced", "top_count",
            "row_start", _BEST, _SUMS, "logprob", "top_ids", "top_logprobs", vocab, parts, max_top,
            nodes, batch,
        ),
    )  # fmt: skip
    # Each part has its largest logit even if no top token is requested: sums are relative to it.
    workspaces = (
        Workspace(_BEST, rows * parts * max(max_top, 1) * 8),
        Workspace(_SUMS, rows * parts * 4),
    )
    return Lowering((listed, joined), workspaces)
