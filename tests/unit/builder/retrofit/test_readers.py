"""The importance of errors in keys and values, against individually rotated queries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from geometries import GPT_OSS_20B

from specbuild.builder.training.retrofit.readers import (
    DISTANCES,
    key_metric,
    moments_of,
    query_moment,
    value_metric,
)
from specbuild.runtime.engine_dir.geometry import Rope

G = replace(GPT_OSS_20B, q_heads=6, kv_heads=2, head_dim=8, hidden=20, rope=Rope(theta=100.0))


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_error_of_a_key_is_weighted_by_its_effect_on_scores() -> None:
    x = drawn(50, G.hidden, seed=0) + 1.5
    weight, bias = drawn(48, G.hidden, seed=1), drawn(48, seed=2)
    queries = (x @ weight.T + bias).view(50, 6, 8)
    metric = key_metric(G, query_moment(weight, bias, moments_of(x)))
    error = drawn(16, seed=3)
    frequency = 100.0 ** (-2 * np.arange(4) / 8)
    total = 0.0
    for distance in DISTANCES:
        for head in range(6):
            e = error.view(2, 8)[head // 3].numpy()
            turned = (e[:4] + 1j * e[4:]) * np.exp(-1j * distance * frequency)
            q = queries[:, head].numpy()
            moved = q[:, :4] @ turned.real + q[:, 4:] @ turned.imag
            total += (moved**2).mean() / len(DISTANCES)
    assert float(error @ metric @ error) == pytest.approx(total, rel=1e-5)


def test_the_error_of_a_value_is_weighted_by_its_effect_on_the_output() -> None:
    output, error = drawn(G.hidden, 48, seed=4), drawn(16, seed=5)
    by_head = output.view(G.hidden, 6, 8)
    moved = [by_head[:, head] @ error.view(2, 8)[head // 3] for head in range(6)]
    total = sum(float(part.square().sum()) for part in moved)
    assert float(error @ value_metric(G, output) @ error) == pytest.approx(total, rel=1e-9)
