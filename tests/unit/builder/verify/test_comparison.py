"""Thresholds of ``verify``, and token-by-token comparison of runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specbuild.builder.verify.comparison import ROUTING_TIE, Comparison, measure
from specbuild.builder.verify.losslessness import Choice
from specbuild.runtime.measure.losslessness import compare_runs
from specbuild.runtime.sampling import SamplingParams


def states(seed: int = 0, rows: int = 6, width: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)


def test_equal_states_pass_and_report_their_rows():
    row = measure("layer", states(), states(), logits=False)
    assert (row.rows, row.max_error, row.passed, row.argmax_agreement) == (6, 0.0, True, None)
    assert row.cosine == pytest.approx(1.0)


def test_the_error_of_states_is_relative_to_the_largest_value_of_a_row():
    expected = states() * 1000
    result = expected.copy()
    result[2, 5] += 0.5 * np.abs(expected[2]).max() * 1e-3
    assert measure("layer", result, expected, logits=False).passed
    result[2, 5] += np.abs(expected[2]).max() * 1e-3
    row = measure("layer", result, expected, logits=False)
    assert row.max_error == pytest.approx(1.5e-3, rel=1e-2) and not row.passed


def test_one_bad_row_among_many_fails():
    result = states(rows=100)
    result[57] = result[57][::-1]
    assert not measure("layer", result, states(rows=100), logits=False).passed


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("logits", [False, True])
def test_values_that_are_not_finite_fail(value, logits):
    result = states()
    result[0, 0] = value
    row = measure("stage", result, states(), logits=logits)
    assert not row.passed
    assert (row.cosine, np.isfinite(row.max_error)) == (-1.0, True)  # JSON has no infinity


def test_another_argmax_passes_only_at_a_near_tie():
    expected = np.zeros((2, 8), np.float32)
    expected[:, 3] = [5.0, 7.0]
    expected[:, 4] = [5.0 - 5e-5, 1.0]
    result = expected.copy()
    result[0, 4] = 5.0 + 5e-5
    row = measure("logits", result, expected, logits=True)
    assert (row.argmax_agreement, row.passed) == (0.5, True)
    expected[0, 4] = result[0, 4] = 5.0 - 5e-4
    result[0, 3] = 5.0 - 6e-4
    row = measure("logits", result, expected, logits=True)
    assert row.max_error < 1e-3 and not row.passed


def test_top_k_counts_shared_ids():
    expected = np.arange(20, dtype=np.float32)[None]
    result = expected.copy()
    result[0, 0] = 18.5  # moves 15 out of the best five
    assert measure("logits", result, expected, logits=True).topk_agreement == pytest.approx(0.8)


def test_stages_are_in_order_and_combine_launches():
    comparison = Comparison()
    for _ in range(2):
        comparison.states({"b": states(), "a": states()}, {"b": states(), "a": states()})
        comparison.logits("logits", states(), states())
    assert [(row.stage, row.rows) for row in comparison.rows()] == [
        ("b", 12),
        ("a", 12),
        ("logits", 12),
    ]


def test_runs_diverge_at_a_near_tie_or_differ():
    prompts = [(1,), (2,), (3,)]
    plain = [(5, 6, 7), (5, 6, 7), (5, 6, 7)]
    other = [(5, 6, 7), (5, 9, 9), (8, 6, 7)]
    prefixes = []

    def gap(prefix):
        prefixes.append(prefix)
        return 1e-5 if prefix == (2, 5) else 0.3

    assert compare_runs(prompts, (plain, other), gap) == (3 + 2 + 1, 1, 1)
    assert prefixes == [(2, 5), (3,)]


def test_a_run_that_ends_early_differs():
    assert compare_runs([(1,)], ([(5, 6)], [(5,)]), lambda _: 0.0) == (1, 1, 0)


def test_gap_of_a_sampled_choice_includes_its_noise():
    from specbuild.plugins_cuda.choose.op import reference as choose

    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))

    class Reference:
        margin = 1e-3

        def run(self, ids):
            assert ids.tolist() == [4, 5, 6]
            both = {"logits": np.stack([np.zeros(50), logits]), "routing_margin": self.margin}
            return type("States", (), both)

    best = logits.topk(2).values
    greedy = Choice("greedy", SamplingParams())
    assert greedy.gap(Reference(), (4, 5, 6)) == pytest.approx(float(best[0] - best[1]))
    unsettled = Reference()
    unsettled.margin = ROUTING_TIE / 2
    assert greedy.gap(unsettled, (4, 5, 6)) == 0
    # Raising the second-best sampled score by slightly more than the gap changes the token.
    sampled = Choice("sampled", SamplingParams(temperature=0.7, seed=3))
    gap = sampled.gap(Reference(), (4, 5, 6))

    def chosen(changed):
        one = torch.ones(1)
        noise = (0.7 * one, 0 * one.int(), one, 3 * one.int(), 2 * one.int())
        return int(choose(changed[None], *noise)[0])

    first = chosen(logits)
    changes = []
    for share in (0.99, 1.01):
        raised = logits + 0.7 * gap * share
        raised[first] = logits[first]
        changes.append(chosen(raised) != first)
    assert changes == [False, True]
