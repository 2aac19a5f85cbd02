"""LK losses: the chance that a drafted token is accepted, as what training raises.

Of the target's distribution p and the draft's q rejection sampling accepts at the rate

    α = Σ_x min(p(x), q(x)) = 1 − TV(p, q)

(Samarin et al., LK Losses, arXiv 2602.23881, section 4; LK^α and LK^λ there, ``lk_loss_type`` alpha
and lambda of SpecForge).
"""

from __future__ import annotations

import torch

from specbuild.builder.training.config import LkLoss


def lk_losses(
    asked: LkLoss, said: torch.Tensor, log_q: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The loss of each position of one step, fp32 [B, n].

    ``said`` [B, n, Vd] are the target's log-probabilities of the tokens that the draft can say: of
    the softmax over *all* its tokens, so Σ exp(said) ≤ 1. The mass that is missing is never
    accepted: it stays in α and in TV. KL alone is of p over the draft's tokens, p̃, since q has
    nothing elsewhere (section 4.4). ``log_q`` [B, n, Vd] are the draft's. ``mask`` [B, n] is 1
    where a position counts, for the mean of α that λ is of:

        LK^α = −log α
        LK^λ = λ·KL(p̃‖q) + (1 − λ)·TV(p, q),   λ = s·exp(−η·mean(α)), a constant to the gradient
    """
    log_alpha = torch.minimum(said, log_q).logsumexp(dim=-1)  # finite where α underflows
    if asked.lk_loss_type == "alpha":
        return -log_alpha
    alpha = log_alpha.exp()
    mean = (alpha.detach() * mask).sum() / mask.sum().clamp_min(1)
    weight = asked.kl_scale * torch.exp(-asked.kl_decay * mean)
    log_p = said.log_softmax(dim=-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    return weight * kl + (1 - weight) * (1 - alpha)
