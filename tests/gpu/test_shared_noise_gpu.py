"""Tokens that TreeExpand drafts with the target's noise: rule, rate and distribution as on the CPU.

The kernel runs once for thousands of positions of equal logits. Its tokens are compared with the
host's rule, and their acceptance rate with that of the coupling, which NumPy computes from both
full distributions.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from coupled_draws import (
    coupled_rate,
    log_softmax,
    logits_pair,
    require_distribution,
    target_samples,
)

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler
from specbuild.builder.backends.cuda.tuning.kernel_case import bits, kernel_case
from specbuild.builder.backends.cuda.tuning.op_runner import OpRunner
from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.launches import Target
from specbuild.plugins_cuda.tree_expand.op import OP
from specbuild.runtime.draft.shared_noise import CANDIDATES, TEMPERATURE_RATIO, SharedNoise
from specbuild.runtime.sampling import SamplingParams

pytestmark = pytest.mark.gpu

ROWS, SEED = 4096, 11
TARGET_VOCAB = 2500


@pytest.fixture(scope="module")
def runner() -> Iterator[OpRunner]:
    yield OpRunner(Compiler("sm_90a"))


def drafted(
    runner: OpRunner, logits: np.ndarray, d2t: np.ndarray, temperature: float, top_k: int = 1
) -> np.ndarray:
    """Return the ids that a GPU drafts at positions 0, 1, … of one seed, int32 [ROWS, top_k]."""

    def make(_: np.random.Generator) -> Arrays:
        return (
            np.tile(logits, (ROWS, 1)),
            np.zeros((ROWS, 1), np.float32),
            d2t,
            np.array(top_k, np.int32),
            np.full(ROWS, temperature, np.float32),
            np.full(ROWS, SEED, np.int32),
            np.arange(ROWS, dtype=np.int32),
            None,
        )

    drawn = kernel_case(OP, Case("rows of equal logits", make))
    assert OP.lower is not None
    lowering = drawn.lowering("decode", Target())
    inputs = {name: bits(tensor) for name, tensor in drawn.inputs.items()}
    outputs = {name: bits(tensor) for name, tensor in drawn.outputs.items()}
    return runner.run(OP, lowering, inputs, outputs)["tokens"]


def draft_vocabulary(size: int) -> np.ndarray:
    """Return target ids of a draft's tokens, ascending int32 [size]."""
    drawn = np.random.default_rng(2).choice(TARGET_VOCAB, size, replace=False)
    return np.sort(drawn).astype(np.int32)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("error", [0.5, 1.5])
def test_rate_and_distribution_follow_from_both_softmaxes(
    runner: OpRunner, error: float, temperature: float
) -> None:
    ids = draft_vocabulary(2051)
    target, draft = logits_pair(3, error, TARGET_VOCAB)
    tokens = drafted(runner, draft[ids], ids - np.arange(len(ids), dtype=np.int32), temperature)
    tokens = tokens[:, 0]
    params = SamplingParams(temperature=temperature, seed=SEED)
    result = float(np.mean(tokens == target_samples(target, params, ROWS)))
    log_p = log_softmax(target / temperature)
    log_q = np.full(TARGET_VOCAB, -np.inf, np.float32)
    log_q[ids] = log_softmax(draft[ids] / (temperature * TEMPERATURE_RATIO))
    expected = coupled_rate(log_p, log_q)
    print(f"T {temperature}, error {error}: rate {result:.4f}, expected {expected:.4f}")
    assert result == pytest.approx(expected, abs=4 * np.sqrt(0.25 / ROWS))
    require_distribution(tokens, log_q)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_tokens_follow_the_rule_of_the_host(runner: OpRunner, temperature: float) -> None:
    """Compare as many tokens as the host's rule has candidates, in order, with their children."""
    ids = draft_vocabulary(CANDIDATES)
    logits = logits_pair(5, 0.0, CANDIDATES)[0]
    top_k = 4
    result = drafted(runner, logits, ids - np.arange(len(ids), dtype=np.int32), temperature, top_k)
    log_q = log_softmax(logits)
    order = np.argsort(-log_q, kind="stable")
    params = SamplingParams(temperature=temperature, seed=SEED)
    noise = SharedNoise((params,) * ROWS, np.arange(ROWS, dtype=np.int32))
    candidates = np.tile(ids[order], (ROWS, 1)), np.tile(log_q[order], (ROWS, 1))
    best, _ = noise.best(*candidates, top_k)
    # Two scores may be equal within a rounding of the logarithm.
    assert np.mean(result == best) > 0.999
    assert np.mean(result[:, 0] == noise.first(*candidates)) > 0.999
