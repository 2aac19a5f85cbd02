"""Drafts that change between steps on a device: tokens and draft caches stay correct.

The toy device refuses to read a slot of the draft's cache that was never written.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples
from toy_device import ToyCuda, toy_cuda
from toy_engine import run
from toy_model import VOCAB, decode_plainly
from toy_plan import BATCHES, DEEPEST, SHAPES

from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.device_costs import METHOD, ShapeCosts, StepCosts
from specbuild.runtime.draft.policy import StepOutcome
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams


def script_of(random: np.random.Generator) -> list[DraftShape | None]:
    """Return runs of equal steps. A draft pauses for longer than its pending buffer lasts."""
    choices = [None, None, *SHAPES]
    phases = range(random.integers(1, 7))
    return [s for _ in phases for s in [choices[random.integers(6)]] * random.integers(1, 10)]


class Scripted:
    """Return one shape after the other in a cycle; record the arguments."""

    max_depth = DEEPEST
    reason = "scripted"

    def __init__(self, script: list[DraftShape | None]) -> None:
        self.script, self.step = script, 0
        self.outcomes: list[StepOutcome] = []

    def shape(self, step_context: StepContext) -> DraftShape | None:
        del step_context
        self.step += 1
        return self.script[self.step % len(self.script)]

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)


def costs_of(seconds: dict[DraftShape | None, float]) -> StepCosts:
    """Return the same costs for every batch and context."""
    entries = []
    for batch in BATCHES:
        for shape, step_s in seconds.items():
            s = shape or DraftShape(0, 0, 0)
            sizes = (s.draft_top_k, s.draft_depth, s.draft_tokens)
            entries.append(ShapeCosts(batch, *sizes, (64,), (step_s,), (0.0,)))
    return StepCosts("Fake H200", "digest", METHOD, tuple(entries))


def scripted(script: list[DraftShape | None]) -> tuple[ToyCuda, Scripted]:
    toy = toy_cuda(step_costs=costs_of({None: 1e-3, SHAPES[0]: 1e-3}))
    policy = Scripted(script)
    toy.engine.decoder._default_policy = lambda _, **__: policy
    return toy, policy


@examples(20)
@given(st.integers(0, 2**31), st.sampled_from([0.0, 1.0]))
def test_any_order_of_drafts_changes_no_token(seed: int, temperature: float) -> None:
    random = np.random.default_rng(seed)
    toy, policy = scripted(script_of(random))
    sizes = random.integers(1, 20, random.integers(1, 5))
    batch = [random.integers(0, VOCAB - 1, n).tolist() for n in sizes]
    sample = SamplingParams(temperature=temperature, seed=7)
    counts = random.integers(1, 31, len(batch)).tolist()
    params = [GenerateParams(max_new_tokens=n, sampling=sample) for n in counts]
    result = run(toy.engine, batch, params)
    assert result.ids == [
        decode_plainly(p, q.max_new_tokens, sample) for p, q in zip(batch, params, strict=True)
    ]
    for outcome in policy.outcomes:
        deepest = 0 if outcome.shape is None else outcome.shape.draft_depth
        for depth, accepted in zip(outcome.depths, outcome.accepted, strict=True):
            assert 0 <= accepted <= depth <= deepest


def test_the_policy_is_called_once_for_every_step() -> None:
    toy, policy = scripted([None, SHAPES[0]])
    run(toy.engine, [[3, 1, 4]], GenerateParams(max_new_tokens=12, ignore_eos=True))
    assert policy.step == sum(name.startswith("step") for name in toy.device.started)


def test_a_draft_after_a_long_pause_is_as_good_as_one_without() -> None:
    """The accepted part of a chain does not depend on how earlier steps drafted."""
    params = GenerateParams(max_new_tokens=40, ignore_eos=True)
    chain = SHAPES[1]
    paused, policy = scripted([*[None] * 12, chain])
    run(paused.engine, [[3, 1, 4]], params)
    steady, other = scripted([chain])
    run(steady.engine, [[3, 1, 4]], params)
    place, found = 4, {}
    for outcome in other.outcomes:
        found[place] = outcome.accepted
        place += outcome.accepted[0] + 1
    place, met = 4, 0
    for outcome in policy.outcomes:
        if outcome.shape is not None and place in found:
            assert outcome.accepted == found[place]
            met += 1
        place += outcome.accepted[0] + 1
    assert met >= 1
    assert any(name.endswith(".extends") for name in paused.device.started)
    # Only where there is no more capacity: DEEPEST + 1 rows may wait, one of them from the prompt.
    steps = [name for name in paused.device.started if name.startswith("step")]
    assert [name.endswith(".extends") for name in steps[: DEEPEST + 2]] == [False] * DEEPEST + [
        True,
        False,
    ]


def test_without_a_draft_no_draft_state_is_stored() -> None:
    toy = toy_cuda()
    params = GenerateParams(max_new_tokens=30, ignore_eos=True)
    run(toy.engine, [[1, 2]], params, speculation=None)
    assert not any(name.endswith(".extends") for name in toy.device.started)


@pytest.mark.parametrize("cheap", [None, *SHAPES])
def test_the_default_follows_the_table(cheap: DraftShape | None) -> None:
    table = {shape: 1.0 for shape in (None, *SHAPES)} | {cheap: 0.05}
    toy = toy_cuda(step_costs=costs_of(table), max_batch_size=4)
    params = GenerateParams(max_new_tokens=24, ignore_eos=True)
    batch = [[1, 2], [3], [5, 8]]
    # The fake's clock has nothing to do with the table's.
    toy.engine.decoder._learned.next = untimed(toy.engine.decoder._learned.next)
    result = run(toy.engine, batch, params)
    assert result.ids == run(toy_cuda().engine, batch, params, speculation=None).ids
    steps = [name for name in toy.device.started if name.startswith("step")]
    sizes = (
        (0, 0, 0) if cheap is None else (cheap.draft_top_k, cheap.draft_depth, cheap.draft_tokens)
    )
    name = ".{}-{}-{}.".format(*sizes)
    assert np.mean([name in step for step in steps]) > 0.8
    assert "step times measured on Fake H200" in toy.engine.default_draft.reason


def untimed(make):
    """Return policies that observe only acceptance."""

    def made(*arguments, **options):
        policy = make(*arguments, **options)
        observe = policy.observe
        policy.observe = lambda o: observe(
            StepOutcome(o.step_context, o.shape, o.depths, o.accepted, None)
        )
        return policy

    return made


def test_a_run_starts_from_the_statistics_of_the_previous_run() -> None:
    toy = toy_cuda(step_costs=costs_of({None: 1.0, SHAPES[1]: 0.1}))
    params = GenerateParams(max_new_tokens=20, ignore_eos=True)
    run(toy.engine, [[1, 2]], params)
    with toy.engine.decoder.device_lock:  # the next request joins no loop of this one
        first = toy.engine.default_draft
    run(toy.engine, [[1, 2]], params)
    assert toy.engine.default_draft is not first
    assert toy.engine.default_draft.acceptance[0] != first.acceptance[0]


def test_a_batch_larger_than_any_drafted_step_runs_without_a_draft() -> None:
    """Sequences do not wait for a draft that the table may omit."""
    costs = costs_of({None: 1.0, SHAPES[1]: 0.1})
    kept = tuple(c for c in costs.steps if c.batch < 4 or c.shape is None)
    toy = toy_cuda(step_costs=StepCosts(costs.gpu, costs.programs, METHOD, kept), max_batch_size=4)
    params = GenerateParams(max_new_tokens=9, ignore_eos=True)
    run(toy.engine, [[1], [2], [3], [4]], params)
    steps = {name for name in toy.device.started if name.startswith("step@4")}
    assert steps
    assert all(".0-0-0." in name for name in steps)


def test_drafts_after_an_end_of_sequence_do_not_count_as_rejected() -> None:
    shape, cut = SHAPES[1], 0
    for end in range(12):
        toy, policy = scripted([shape])
        decoder = toy.engine.decoder
        manifest = decoder._manifest  # type: ignore[attr-defined]
        target = replace(manifest.target, eos_token_ids=(end,))
        decoder._manifest = replace(manifest, target=target)  # type: ignore[attr-defined]
        [record] = run(toy.engine, [[3, 1, 4]], GenerateParams(max_new_tokens=40)).records
        if record.finish_reason == "length" or not policy.outcomes:
            continue
        last = policy.outcomes[-1]
        count = len(record.output_ids) - 1 - sum(o.accepted[0] + 1 for o in policy.outcomes[:-1])
        if count == last.accepted[0] < shape.draft_depth:
            assert last.depths == last.accepted
            cut += 1
    assert cut
