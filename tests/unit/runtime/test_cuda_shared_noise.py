"""Sampled drafts of a CUDA plan carry the noise of the rows that verify them.

The plan runs by the references of its ops. Its draft tokens are compared with numpy's noise at the
positions of the rows that verify them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from checkpoints import write_pair
from test_cuda_interpreted import CHAIN, TREE, engine_of, lower, prompts
from toy_engine import run

from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.backends.cuda.plan.interpret import OpCall, PlanInterpreter
from specbuild.runtime.draft.shared_noise import TEMPERATURE_RATIO, gumbel_noise
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams

TOKENS, TEMPERATURE, SEED = 10, 0.8, 5


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> LoweredEngine:
    path = tmp_path_factory.mktemp("checkpoints")
    write_pair(path)
    return lower(path)


def expanded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Record the inputs and outputs of every later TreeExpand of an interpreter."""
    seen: list[dict[str, torch.Tensor]] = []
    call_op = PlanInterpreter.call

    def spy(self: PlanInterpreter, call: OpCall, *contributions: Sequence[torch.Tensor]) -> None:
        call_op(self, call, *contributions)
        if call.op == "TreeExpand":
            tensors = {**call.inputs, **call.outputs}
            found = {n: self._tensor(of).clone() for n, of in tensors.items() if of is not None}
            seen.append({**found, "offset": torch.tensor(call.attributes["offset"])})

    monkeypatch.setattr(PlanInterpreter, "call", spy)
    return seen


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_drafts_have_the_noise_of_the_rows_that_verify_them(
    lowered: LoweredEngine, monkeypatch: pytest.MonkeyPatch, shape: DraftShape
) -> None:
    engine, _ = engine_of(lowered)
    sampling = SamplingParams(TEMPERATURE, seed=SEED)
    params = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True, sampling=sampling)
    ids = prompts(engine)[0]
    seen = expanded(monkeypatch)
    record = run(engine, [ids], [params], speculation=shape).records[0]
    assert len(seen) == shape.draft_depth * record.stats.steps
    lengths = [int(call["position"][0]) for call in seen[:: shape.draft_depth]]
    # The root of the first step is the token after the prompt. Each step then adds its tokens.
    assert lengths[0] == len(ids)
    assert all(1 <= b - a <= shape.draft_depth + 1 for a, b in pairwise(lengths))
    for number, call in enumerate(seen):
        level = number % shape.draft_depth
        assert int(call["offset"]) == level
        logits = call["logits"].float().numpy()
        target_ids = (np.arange(logits.shape[1]) + call["d2t"].numpy()).astype(np.int32)
        rows = len(logits)
        position = np.full(rows, lengths[number // shape.draft_depth] + level, np.int32)
        noise = gumbel_noise(
            np.full(rows, SEED, np.int32), position, np.tile(target_ids, (rows, 1))
        )
        score = logits / (TEMPERATURE_RATIO * TEMPERATURE) + noise
        best = np.argsort(-score, axis=1, kind="stable")[:, : shape.draft_top_k]
        assert np.array_equal(call["tokens"].numpy().reshape(rows, -1), target_ids[best])


def test_greedy_sequences_draft_their_best_tokens_in_a_mixed_batch(
    lowered: LoweredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = engine_of(lowered)
    greedy = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    sampled = GenerateParams(
        max_new_tokens=TOKENS, ignore_eos=True, sampling=SamplingParams(TEMPERATURE, seed=SEED)
    )
    seen = expanded(monkeypatch)
    run(engine, prompts(engine)[:2], [greedy, sampled], speculation=CHAIN)
    for call in (call for call in seen if len(call["temperature"]) == 2):
        for b in np.flatnonzero(call["temperature"].numpy() == 0):
            draft_id = int(call["logits"][b].argmax())
            assert int(call["tokens"][b, 0]) == draft_id + int(call["d2t"][draft_id])
