"""Fidelity against torch's own losses, with random logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from specbuild.runtime.measure.fidelity import FidelityRows


@given(st.integers(1, 40), st.integers(2, 50), st.integers(0, 2**32 - 1))
def test_losses_equal_torch(rows: int, vocab: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    reference = (random.standard_normal((rows, vocab)) * 5).astype(np.float32)
    other = reference + random.standard_normal((rows, vocab)).astype(np.float32)
    following = random.integers(0, vocab, rows)
    found = FidelityRows()
    cut = rows // 3
    for part in (slice(0, cut), slice(cut, rows)):
        found.add(reference[part], other[part], following[part])
    result = found.result()
    p, q = (torch.from_numpy(logits).double() for logits in (reference, other))
    wanted = torch.from_numpy(following)
    losses = [F.cross_entropy(logits, wanted, reduction="none") for logits in (p, q)]
    divergence = F.kl_div(
        q.log_softmax(-1), p.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    assert result.tokens == rows
    assert result.perplexity == pytest.approx(losses[0].mean().exp().item())
    assert result.perplexity_other == pytest.approx(losses[1].mean().exp().item())
    ratio = (losses[1].mean() - losses[0].mean()).exp().item()
    assert result.perplexity_ratio == pytest.approx(ratio)
    assert result.divergence == pytest.approx(divergence.mean().item(), abs=1e-12)
    assert result.divergence_max == pytest.approx(divergence.max().item(), abs=1e-12)
    assert result.agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    if rows > 1:
        error = (losses[1] - losses[0]).std().item() / rows**0.5 * ratio
        assert result.perplexity_ratio_error == pytest.approx(error)


def test_masked_tokens_count_nothing() -> None:
    reference = np.array([[0.0, 0.0, -np.inf]], np.float32)
    other = np.array([[0.0, 1.0, -np.inf]], np.float32)
    rows = FidelityRows()
    rows.add(reference, other, np.array([0]))
    q = np.exp(other[0, :2]) / np.exp(other[0, :2]).sum()
    assert rows.result().divergence == pytest.approx(0.5 * np.log(0.5 / q).sum())
