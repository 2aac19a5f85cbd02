"""GPT-OSS in transformers as a teacher of drafts, with the fastest implementation of experts."""

from __future__ import annotations

from typing import Any

import torch

# One dense product of all experts wastes arithmetic. Up to this many inner columns it is still
# faster than the sort and the launches of a grouped product.
MAX_DENSE_WIDTH = 1024
DENSE_EXPERTS = "specbuild_dense"


def prepare_teacher(model: Any) -> None:
    """Set the implementation of experts of the model in transformers."""
    model.set_experts_implementation(_experts_implementation(model))


def _experts_implementation(model: Any) -> str:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    config = model.config
    if config.num_local_experts * config.intermediate_size > MAX_DENSE_WIDTH:
        return "grouped_mm"
    ALL_EXPERTS_FUNCTIONS.register(DENSE_EXPERTS, _dense_experts)
    return DENSE_EXPERTS


def _dense_experts(
    self: Any, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute every expert for every row; those that a row did not choose have the weight 0.

    ``hidden`` [T, H], ``expert_ids`` [T, k] and ``weights`` [T, k] → [T, H].
    """
    shares = hidden.new_zeros(len(hidden), self.num_experts)
    shares.scatter_(1, expert_ids, weights.to(shares.dtype))
    inner = torch.einsum("th,ehi->tei", hidden, self.gate_up_proj) + self.gate_up_proj_bias
    inner = self._apply_gate(inner) * shares.unsqueeze(-1)
    return torch.einsum("tei,eih->th", inner, self.down_proj) + shares @ self.down_proj_bias
