"""Prompts in a plugin engine: small launches use decoding kernels, large ones others."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from plugin_engine import GraphSession, build_plugins, executor_of
from toy_engine import run

from specbuild.builder.backends.tensorrt.plugins.role_sizes import phase_of
from specbuild.builder.engine.backend_sizes import MAX_DECODE_ROWS
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import GenerateParams

LIMITS = {
    "max_seq_len": 288, "max_batch_size": 2, "page_size": 16,
    "draft_top_k": 1, "draft_depth": 2, "draft_tokens": 2,
}  # fmt: skip
LENGTHS = (150, 140, 9, 270, 200, 30)


class RoundedSession(GraphSession):
    """A session in which a prompt's kernels change logits by far more than bf16 does."""

    def _run(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        super()._run(shapes, addresses)
        if "logits" not in addresses or "token_ids" not in shapes:
            return
        if phase_of({"T": shapes["token_ids"][0]}) == "prefill":
            (port,) = (port for port in self._role.outputs if port.name == "logits")
            assert port.dtype == "float32"
            count = shapes["logit_rows"][0] * int(port.shape[1])
            logits = (ctypes.c_float * count).from_address(addresses["logits"])
            np.ctypeslib.as_array(logits)[:] *= 2


@pytest.mark.slow
def test_the_result_of_a_prompt_does_not_depend_on_others(
    target_path: Path, draft_path: Path
) -> None:
    """With a draft, sequences end at other times, and other prompts share a launch."""
    built = build_plugins(target_path, draft_path, **LIMITS)
    prompts = [
        [1 + (7 * i + 3 * n * n) % 50 for n in range(size)] for i, size in enumerate(LENGTHS)
    ]
    params = [GenerateParams(max_new_tokens=3 + 2 * (i % 3), ignore_eos=True) for i in range(6)]

    def first(order: list[int], shape: DraftShape | None) -> dict[int, float]:
        """Each first token's log-probability, which follows from the prompt alone."""
        executor, _, _ = executor_of(built, session=RoundedSession)
        assert executor.capabilities.invariant_rows == MAX_DECODE_ROWS
        engine, chosen = Engine(built.manifest, executor), [params[i] for i in order]
        found = run(engine, [prompts[i] for i in order], chosen, speculation=shape).records
        return {i: (r.logprobs or ())[0] for i, r in zip(order, found, strict=True)}

    every = list(range(len(prompts)))
    plain = first(every, None)
    others = [first(every, DraftShape(1, 2, 2)), first(every[::-1], None)]
    others += [first([i], None) for i in every]
    for found in others:
        for i, value in found.items():
            assert value == pytest.approx(plain[i], abs=0.05), f"prompt {i}"
