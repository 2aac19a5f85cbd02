"""Perplexity of held-out rows, with the new heads or without."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from specbuild.builder.training.corpus import Rows
from specbuild.builder.training.heads.backbone import Backbone


@torch.no_grad()
def perplexity(backbone: Backbone, rows: Rows, *, heads: bool, batch_size: int) -> float:
    """``exp`` of the mean cost of the rows' next tokens, each row read alone."""
    device = str(backbone.head.weight.device)
    costs = []
    for start in range(0, len(rows.ids), batch_size):
        ids = rows.batch(slice(start, start + batch_size), device).ids
        with backbone.switch.turned(heads):
            states = backbone.run(ids).last[:, :-1]
        for row, wanted in zip(states, ids[:, 1:], strict=True):
            logits = backbone.head(row).float()
            costs.append(F.cross_entropy(logits, wanted, reduction="none").double())
    return float(torch.cat(costs).mean().exp())
