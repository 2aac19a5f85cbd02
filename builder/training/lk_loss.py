"""LK losses, which minimize the rejection of draft tokens.

For the target's distribution p and the draft's q, rejection sampling accepts at the rate

    α = Σ_x min(p(x), q(x)) = 1 − TV(p, q)

(Samarin et al., LK Losses, arXiv 2602.23881, section 4). SpecForge's ``lk_loss_type`` calls LK^α
alpha and LK^λ lambda.
"""

from __future__ import annotations

import torch

from specbuild.builder.training.config import LkLoss


def lk_losses(
    options: LkLoss, log_p: torch.Tensor, log_q: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return the loss of each position of one step, fp32 [B, n].

    ``log_p`` [B, n, Vd] are the target's log-probabilities of the draft's tokens. They come from
    the softmax over *all* tokens of the target, so Σ exp(log_p) ≤ 1. The missing mass is never
    accepted: it counts in α and in TV. KL uses p̃, which is p normalized over the draft's tokens,
    because q is 0 for other tokens (section 4.4). ``log_q`` [B, n, Vd] are the draft's
    log-probabilities. ``mask`` [B, n] is 1 at positions that count in the mean of α for λ:

        LK^α = −log α
        LK^λ = λ·KL(p̃‖q) + (1 − λ)·TV(p, q),   λ = s·exp(−η·mean(α)), a constant to the gradient
    """
    log_alpha = torch.minimum(log_p, log_q).logsumexp(dim=-1)  # finite even if α underflows
    if options.lk_loss_type == "alpha":
        return -log_alpha
    alpha = log_alpha.exp()
    mean = (alpha.detach() * mask).sum() / mask.sum().clamp_min(1)
    weight = options.kl_scale * torch.exp(-options.kl_decay * mean)
    log_p_draft = log_p.log_softmax(dim=-1)
    kl = (log_p_draft.exp() * (log_p_draft - log_q)).sum(dim=-1)
    return weight * kl + (1 - weight) * (1 - alpha)
