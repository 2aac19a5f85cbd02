"""The table of step costs: interpolation, its file, and the engines that accept it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_device import toy_cuda
from toy_plan import BATCHES, SHAPES, cuda_manifest, toy_plan

from specbuild.runtime.decode.device.program_costs import ProgramCosts
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.draft.acceptance import PRIOR_WEIGHT
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.device_costs import (
    METHOD,
    ShapeCosts,
    StepCosts,
    from_bytes,
    interpolated,
    programs_digest,
    to_bytes,
    unusable_reason,
    usable_step_costs,
)
from specbuild.runtime.draft.draft_models import ModelShape, RaggedShape
from specbuild.runtime.draft.policy import MARGIN, MeasuredPolicy, StepOutcome
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest, StoredFile
from specbuild.runtime.engine_dir.plan import ProgramEntry
from specbuild.runtime.errors import EngineFileError
from specbuild.runtime.measure.step_measurement import contexts_of, measure_step_costs

NO_DRAFT = DraftShape(0, 0, 0)
GPU = "Fake H200"
rising = st.lists(st.integers(0, 200_000), min_size=1, max_size=5, unique=True).map(sorted)
times = st.floats(1e-5, 0.5)


def entry(
    shape: DraftShape, batch: int, contexts: list[int], step_s: list[float], share: float = 0.3
) -> ShapeCosts:
    """Return one entry whose draft takes a fraction of every step."""
    part = share if shape.draft_depth else 0.0
    sizes = (shape.draft_top_k, shape.draft_depth, shape.draft_tokens)
    draft_s = tuple(part * t for t in step_s)
    return ShapeCosts(batch, *sizes, tuple(contexts), tuple(step_s), draft_s)


@st.composite
def tables(draw: st.DrawFn) -> StepCosts:
    """Draw times for every batch and draft of the toy's plan."""
    entries = []
    for batch in BATCHES:
        for shape in (NO_DRAFT, *SHAPES):
            contexts = draw(rising)
            step_s = draw(st.lists(times, min_size=len(contexts), max_size=len(contexts)))
            entries.append(entry(shape, batch, contexts, step_s, draw(st.floats(0, 1))))
    return StepCosts(GPU, "digest", METHOD, tuple(entries))


def of_model(kind: str, entries: list[ShapeCosts]) -> list[ShapeCosts]:
    return [replace(entry, drafter=kind) for entry in entries]


def test_draft_models_have_separate_times() -> None:
    """Steps without a draft are the same for all of them."""
    chains = [DraftShape(1, depth, depth) for depth in (1, 2)]
    of_one = [
        entry(shape, 1, [64], [step_s])
        for shape, step_s in zip(chains, (0.013, 0.014), strict=True)
    ]
    other = [entry(shape, 1, [64], [0.011]) for shape in chains]
    plain = entry(NO_DRAFT, 1, [64], [0.01])
    steps = (plain, *of_model("p-eagle", of_one), *of_model("dflash", other))
    costs = from_bytes(to_bytes(StepCosts(GPU, "digest", METHOD, steps)))
    assert [(c.shape, c.step_s) for c in costs.steps] == [(c.shape, c.step_s) for c in steps]
    named = [ModelShape(1, d, d, kind) for kind in ("p-eagle", "dflash") for d in (1, 2)]
    assert list(costs.shapes()) == named
    assert costs.step_s(named[2], batch=1, context=64) == 0.011
    assert costs.step_s(chains[0], batch=1, context=64) is None
    table = ProgramTable(SimpleNamespace(programs=[
        ProgramEntry("step", "step", "step", 1, 1, s.draft_top_k, s.draft_depth, s.draft_tokens,
                     full_logits=False, launches=1, drafter=kind)
        for kind, s in (("", NO_DRAFT), *[(s.drafter, s) for s in named])
    ]))  # type: ignore[arg-type]  # fmt: skip
    for models, wanted in (
        (("p-eagle", "dflash"), named), (("dflash",), named[2:]), ((), []), (("",), []),
    ):  # fmt: skip
        found = ProgramCosts(costs, table, full_logits=False, models=models)
        assert list(found.shapes) == wanted
        times = {s: costs.step_s(s, batch=1, context=128) for s in named}
        expected = [0.01, *(times[shape] for shape in wanted)]
        assert list(found.step_s(StepContext(1, 100, 0))) == pytest.approx(expected)


def test_a_file_of_one_draft_names_none() -> None:
    """It therefore has the keys of earlier versions."""
    costs = StepCosts(GPU, "digest", METHOD, (entry(SHAPES[0], 1, [64], [0.01]),))
    assert "drafter" not in json.loads(to_bytes(costs))["steps"][0]


def with_programs(manifest: Manifest, digest: str = "0" * 32) -> Manifest:
    files = {name: StoredFile(10, digest) for name in ("plan.json", "programs/a.json", "x.json")}
    return replace(manifest, files=files)


@settings(max_examples=30, deadline=None)
@given(tables())
def test_the_table_can_be_read_from_its_file(costs: StepCosts) -> None:
    found = from_bytes(to_bytes(costs))
    assert replace(found, steps=()) == replace(costs, steps=())
    for ours, theirs in zip(found.steps, costs.steps, strict=True):
        assert (ours.batch, ours.shape, ours.contexts) == (
            theirs.batch,
            theirs.shape,
            theirs.contexts,
        )
        np.testing.assert_allclose(ours.step_s, theirs.step_s, atol=6e-8)
        np.testing.assert_allclose(ours.draft_s, theirs.draft_s, atol=6e-8)


@settings(max_examples=60, deadline=None)
@given(rising, st.data())
def test_it_lies_between_its_neighbours(places: list[int], data: st.DataObject) -> None:
    values = data.draw(st.lists(times, min_size=len(places), max_size=len(places)))
    for place, value in zip(places, values, strict=True):
        assert interpolated(places, values, place) == pytest.approx(value)
    inside = data.draw(st.floats(places[0], places[-1]))
    assert interpolated(places, values, inside) == pytest.approx(np.interp(inside, places, values))
    beyond = places[-1] + data.draw(st.integers(1, 1000))
    assert interpolated(places, values, beyond) >= values[-1]
    if places[0] > 0:
        assert interpolated(places, values, places[0] - 1) == values[0]


def test_times_of_steps_and_of_the_target() -> None:
    chain = DraftShape(1, 3, 3)
    costs = StepCosts(
        GPU,
        "digest",
        METHOD,
        (
            entry(NO_DRAFT, 1, [0, 1000], [1.0e-3, 2.0e-3]),
            entry(NO_DRAFT, 4, [0, 1000], [3.0e-3, 5.0e-3]),
            entry(DraftShape(1, 1, 1), 1, [0, 1000], [2.0e-3, 4.0e-3], share=0.25),
            entry(chain, 1, [0, 1000], [4.0e-3, 8.0e-3], share=0.5),
        ),
    )
    assert costs.step_s(None, batch=1, context=500) == pytest.approx(1.5e-3)
    assert costs.step_s(None, batch=2, context=1000) == pytest.approx(3.0e-3)
    assert costs.step_s(None, batch=5, context=0) is None
    assert costs.step_s(chain, batch=1, context=2000) == pytest.approx(12.0e-3)
    assert costs.step_s(DraftShape(2, 2, 2), batch=1, context=0) is None
    # 1 token of each sequence: 1 ms; 2: 1.5 ms; 4: 2 ms. 3 lies between, 8 on the last slope.
    found = [costs.target_s(n, batch=1, context=0) for n in (1, 2, 3, 4, 8)]
    assert found == pytest.approx([1.0e-3, 1.5e-3, 1.75e-3, 2.0e-3, 3.0e-3])
    assert costs.shapes() == (DraftShape(1, 1, 1), chain)


@pytest.mark.parametrize(
    "change",
    [
        {"step_s": [0.0]},
        {"step_s": [-1.0]},
        {"step_s": [1.0, 2.0]},
        {"contexts": []},
        {"contexts": [-1]},
        {"batch": 0},
        {"draft_s": [9.0]},
        {"draft_s": [float("nan")]},
        {"draft_depth": 0},
        {"surprise": 1},
        {"contexts": "64"},
    ],
)
def test_rejects_a_malformed_entry(change: dict) -> None:
    costs = StepCosts(GPU, "d", METHOD, (entry(SHAPES[1], 1, [64], [1e-3]),))
    data = json.loads(to_bytes(costs))
    data["steps"][0] |= change
    with pytest.raises(EngineFileError, match=r"specbuild tune"):
        from_bytes(json.dumps(data).encode())


def test_rejects_an_empty_table_and_duplicate_entries() -> None:
    twice = StepCosts(GPU, "d", METHOD, (entry(SHAPES[1], 1, [64], [1e-3]),) * 2)
    with pytest.raises(EngineFileError, match="two entries"):
        from_bytes(to_bytes(twice))
    for data in (b"", b"\xff", b"[]", b"[" * 50_000):
        with pytest.raises(EngineFileError):
            from_bytes(data)


def test_a_table_speaks_for_its_gpu_and_its_programs_only() -> None:
    manifest = with_programs(cuda_manifest())
    steps = (entry(NO_DRAFT, 1, [64], [1e-3]),)
    costs = StepCosts(GPU, programs_digest(manifest), METHOD, steps)
    assert unusable_reason(costs, manifest, GPU) is None
    assert "no step costs" in usable_step_costs(None, manifest, GPU)[1]
    assert usable_step_costs(to_bytes(costs), manifest, GPU) == (costs, "")
    assert "specbuild tune" in usable_step_costs(b"{}", manifest, GPU)[1]
    assert "this is Fake H100" in str(unusable_reason(costs, manifest, "Fake H100"))
    changed = with_programs(cuda_manifest(), "1" * 32)
    assert "programs changed" in str(unusable_reason(costs, changed, GPU))
    other = replace(costs, method="by guess")
    assert "another version" in str(unusable_reason(other, manifest, GPU))
    drafted = replace(costs, steps=(entry(SHAPES[0], 1, [64], [1e-3]),))
    assert "without a draft" in str(unusable_reason(drafted, manifest, GPU))


@settings(max_examples=60, deadline=None)
@given(
    tables(),
    st.lists(st.integers(0, 400), min_size=5, max_size=5),
    st.integers(1, BATCHES[-1]),
    st.integers(0, 100_000),
)
def test_the_policy_agrees_with_brute_force(
    costs: StepCosts, hits: list[int], batch: int, context: int
) -> None:
    """After many steps of a chain of three with given hits, the choice is within the margins."""
    programs = ProgramTable(toy_plan(cuda_manifest()))
    known = ProgramCosts(costs, programs, full_logits=False)
    policy = MeasuredPolicy(known, prior=0.6, exploration_share=0.0)
    step_context = StepContext(batch, 10_000, 0, context)
    chain, random = DraftShape(1, 3, 3), np.random.default_rng(hits)
    for _ in range(60):
        accepted = int(random.choice(4, p=(np.array(hits[:4]) + 1) / (sum(hits[:4]) + 4)))
        policy.observe(StepOutcome(step_context, chain, [3], [accepted], None))
    rates = brute_force(policy, costs, batch, context)
    shape = policy.shape(step_context)
    best = max(rates.values())
    assert rates[shape] * MARGIN >= best * 0.999
    assert shape is None or rates[shape] > rates[None]


def brute_force(
    policy: MeasuredPolicy, costs: StepCosts, batch: int, context: int
) -> dict[DraftShape | None, float]:
    """Return tokens per second and sequence of every draft: the sum over paths over the time."""
    chances = policy.acceptance
    # Contexts within 256 tokens share their costs.
    middle = (context // 256 + 0.5) * 256
    rates = {}
    for shape in (None, *SHAPES):
        depth, chain = (0, []) if shape is None else (shape.draft_depth, chances)
        if shape is not None and shape.draft_top_k > 1:
            width = shape.draft_tokens / depth
            chain = [1 - (1 - p) * width**-0.5 for p in [*chances, chances[-1]]]
        tokens = sum(np.prod(chain[:k]) for k in range(depth + 1))
        step_s = costs.step_s(shape, batch=batch, context=middle)
        assert step_s is not None
        rates[shape] = tokens / step_s
    return rates


def test_a_tried_tree_is_estimated_from_its_own_acceptance() -> None:
    tree = DraftShape(2, 3, 6)
    cheap = [entry(s, 1, [0], [1e-3 if s == tree else 2e-3]) for s in (NO_DRAFT, *SHAPES)]
    costs = StepCosts(GPU, "d", METHOD, tuple(cheap))
    programs = ProgramTable(toy_plan(cuda_manifest()))
    known = ProgramCosts(costs, programs, full_logits=False)
    policy = MeasuredPolicy(known, prior=0.5, exploration_share=0.0)
    step_context = StepContext(1, 1000, 0)
    assert policy.shape(step_context) == tree
    assert "tree of 2x3x6" in policy.reason
    before = policy.acceptance
    for _ in range(10 * int(PRIOR_WEIGHT)):
        policy.observe(StepOutcome(step_context, tree, [3], [0], None))
    assert policy.acceptance == before
    dear = [entry(s, 1, [0], [1e-3 if s == NO_DRAFT else 1.5e-3]) for s in (NO_DRAFT, *SHAPES)]
    policy._costs = ProgramCosts(
        StepCosts(GPU, "d", METHOD, tuple(dear)), programs, full_logits=False
    )
    assert policy.shape(step_context) != tree


def test_shapes_beyond_every_step_are_not_selected() -> None:
    cheap = [entry(s, 4, [0], [1e-3]) for s in (NO_DRAFT, DraftShape(1, 1, 1))]
    costs = StepCosts(GPU, "d", METHOD, (*cheap, entry(DraftShape(1, 3, 3), 2, [0], [1e-4])))
    programs = ProgramTable(toy_plan(cuda_manifest()))
    known = ProgramCosts(costs, programs, full_logits=True)
    assert known.shapes == (DraftShape(1, 1, 1), DraftShape(1, 3, 3))
    assert list(known.step_s(StepContext(4, 9, 0))) == [1e-3, 1e-3, float("inf")]
    assert MeasuredPolicy(known, exploration_share=0.0).shape(StepContext(4, 9, 0)) == DraftShape(
        1, 1, 1
    )


@pytest.mark.parametrize(
    ("max_seq_len", "contexts"),
    [
        (32, (16,)),
        (200, (64, 140)),
        (4096, (64, 1024, 4036)),
        (131072, (64, 1024, 8192, 32768, 131012)),
        (1100, (64, 1024)),
    ],
)
def test_contexts_fit_the_engine(max_seq_len: int, contexts: tuple[int, ...]) -> None:
    assert contexts_of(max_seq_len, 4) == contexts


def test_every_step_program_is_measured() -> None:
    shapes = SHAPES[1:3]
    toy = toy_cuda(max_batch_size=3, shapes=shapes)
    lines: list[str] = []
    costs = measure_step_costs(toy.engine, lines.append, repeats=2)
    # The fake's clock counts operations: one kernel and the mark behind it.
    assert {(c.batch, c.shape) for c in costs.steps} == {
        *((batch, shape) for batch in (1, 2, 3) for shape in (None, *shapes)),
        *((batch, RaggedShape(1, 3, 3, "", 3)) for batch in (2, 3)),
    }
    assert costs.shapes() == shapes
    for c in costs.steps:
        assert c.contexts == (32,)
        assert c.step_s == (2.0,)
        assert c.draft_s == ((2.0 if c.draft_depth else 0.0),)
    assert costs.gpu == GPU
    assert len(lines) == 3
    assert not toy.ledger.held
    assert from_bytes(to_bytes(costs)) == costs


def test_measuring_stops_at_its_time_limit_but_covers_every_batch() -> None:
    toy = toy_cuda(max_seq_len=256, max_batch_size=4, shapes=SHAPES[:1])
    costs = measure_step_costs(toy.engine, [].append, repeats=1, budget_s=0.0)
    assert {c.batch for c in costs.steps} == set(BATCHES)
    assert {c.contexts for c in costs.steps} == {(64,)}


def test_contexts_that_do_not_rise_are_malformed() -> None:
    entry = ShapeCosts(1, 0, 0, 0, (64, 64), (1e-3, 2e-3), (0.0, 0.0))
    data = to_bytes(StepCosts("g", "d", METHOD, (entry,)))
    with pytest.raises(EngineFileError, match=r"steps\[0\] is malformed"):
        from_bytes(data)
