"""The terms of the loss of new heads: names and definitions."""

from __future__ import annotations

LOGITS_KL, LOGITS_MSE, LONG_LOGITS = "logits-kl", "logits-mse", "long-logits-l2"
HIDDEN_MSE, ATTENTION_KL = "hidden-mse", "attention-kl"
LOGIT_TERMS = (LOGITS_KL, LOGITS_MSE, LONG_LOGITS)
TERMS = {
    LOGITS_KL: "KL divergence of the model's next tokens from the changed model's",
    LOGITS_MSE: "mean square change of the logits",
    LONG_LOGITS: "the same at positions from --long-context on",
    HIDDEN_MSE: "square change of --hidden-layers' outputs over their square, a token",
    ATTENTION_KL: "KL divergence of attention, summed over heads, from the indexer's scores",
}
