"""The launches of Choose."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    Argument,
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Workspace,
)

_THREADS, _WARP = 512, 32
_LOGITS_OF_A_PART = 8192
_DIGITS = 256
_CELL_BYTES = 2 * _DIGITS * _WARP * 4
_LIST_BYTES = 6144 * 8
_BEST, _SUMS, _COUNTS = "workspace_best", "workspace_sums", "workspace_counts"
_MASSES, _KEPT, _NOISY = "workspace_masses", "workspace_kept", "workspace_noisy"
_ARRIVED = "workspace_arrived"


def mass_bits(vocab: int) -> int:
    """Return the bits of a token's mass, such that the sums of one lane fit in 32 bits."""
    tokens_of_a_lane = vocab // _WARP + 4
    return min(23, 32 - tokens_of_a_lane.bit_length())


def lower(request: LoweringRequest) -> Lowering:
    """Return three launches with a CTA per 8192 logits; rows are independent."""
    rows, vocab = request.tensors["logits"].shape
    parts = -(-vocab // _LOGITS_OF_A_PART)

    def launch(entry: str, *arguments: Argument, shared_bytes: int = 0) -> OpLaunch:
        return OpLaunch(
            Kernel("choose", entry),
            grid=(parts, rows, 1),
            block=_THREADS,
            shared_bytes=shared_bytes,
            arguments=arguments,
        )

    launches = (
        launch("summarise_parts", "logits", _BEST, _SUMS, vocab),
        launch(
            "cut_tails", "logits", "temperature", "top_k", "top_p", "floor", _BEST, _SUMS, _COUNTS,
            _MASSES, _KEPT, _ARRIVED, vocab, float(2 ** mass_bits(vocab)),
            shared_bytes=_CELL_BYTES + _LIST_BYTES,
        ),
        launch(
            "choose", "logits", "temperature", "top_k", "top_p", "seed", "position", "floor",
            "choice", "logprob", _BEST, _SUMS, _KEPT, _NOISY, _ARRIVED, vocab,
        ),
    )  # fmt: skip
    workspaces = (
        Workspace(_BEST, rows * parts * 8),
        Workspace(_SUMS, rows * parts * 4),
        Workspace(_COUNTS, rows * parts * _DIGITS * 4),
        Workspace(_MASSES, rows * parts * _DIGITS * 8),
        Workspace(_KEPT, rows * 2 * 4),
        Workspace(_NOISY, rows * parts * 8),
        Workspace(_ARRIVED, 2 * rows * 4, zeroed=True),
    )
    return Lowering(launches, workspaces)
