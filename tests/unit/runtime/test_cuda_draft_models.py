"""Several draft models in one CUDA engine, with a real plan and the interpreter as kernels.

Rules define the tokens of target and drafts, and how many tokens of a chain are accepted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from checkpoints import write_draft, write_target
from dflash_drafts import write_dflash
from p_eagle_drafts import write_p_eagle
from plan_host import PlanHost, Step, lowered_engine, step_name
from synthetic_chains import expected_histogram
from synthetic_models import successors, tiny
from test_cuda_interpreted import InterpretedRunner
from test_cuda_interpreted import engine_of as engine_of_programs
from toy_engine import CACHING, run

from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.synth import write_checkpoints
from specbuild.runtime.decode.device.decoder import DeviceDecoder
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.device_costs import METHOD, ShapeCosts, StepCosts
from specbuild.runtime.draft.draft_models import ModelShape, model_of
from specbuild.runtime.draft.policy import StepOutcome
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.drafters.dflash import DFlashRecord
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Record
from specbuild.runtime.engine_dir.drafters.p_eagle import PEagleRecord
from specbuild.runtime.engine_dir.drafters.record import ModelRecord
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import GenerateParams

KINDS = ("eagle3", "p-eagle")
LEVELS, TOKENS, PROMPT = 3, 22, 24
CHAIN = DraftShape(1, LEVELS, LEVELS)
SIZES = {
    "max_seq_len": 64,
    "max_batch_size": 3,
    "page_size": 16,
    "draft_top_k": 1,
    "draft_depth": LEVELS,
    "draft_tokens": LEVELS,
}
# A step of four: a draft, the name of a program, or None for no draft.
Way: TypeAlias = DraftShape | str | None
RECORDS: dict[str, type[ModelRecord]] = {
    "eagle3": Eagle3Record,
    "p-eagle": PEagleRecord,
    "dflash": DFlashRecord,
}
# The references round differently with the number of rows, unlike the kernels.
NEAR = 0.05


@dataclass
class Made:
    """Checkpoints by kind, and the model whose rules they follow."""

    folder: Path
    models: dict[str, SynthModel]

    def lower(self, *kinds: str) -> LoweredEngine:
        """Return the programs of an engine of the target with these drafts."""
        return lowered_engine(
            self.folder / KINDS[0] / "target",
            tuple(self.folder / kind / "draft" for kind in kinds),
            **SIZES,
        )

    @property
    def prompts(self) -> list[list[int]]:
        return self.models[KINDS[0]].prompts()[:3]

    def says(self, kind: str) -> tuple[list[int], dict[int, int]]:
        """Return the next tokens of target and draft after each token."""
        return successors(self.models[kind])

    def accepted(self, kind: str, root: int, depth: int) -> int:
        """Return the number of accepted tokens of a chain after a token."""
        target, draft = self.says(kind)
        count = 0
        while count < depth and draft[root] == target[root]:
            count, root = count + 1, target[root]
        return count


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The second draft reads the target's layers in another order than the first, and one less."""
    folder, models = tmp_path_factory.mktemp("models"), {}
    for kind in KINDS:
        model = models[kind] = tiny(
            0.78, draft_kind=kind, layers=2, prompts=3, prompt_tokens=PROMPT
        )
        if kind == "p-eagle":
            assert model.draft is not None
            model.draft = replace(model.draft, layers=1, aux_layers=(1, 0))
        write_checkpoints(model, folder / kind, SilentProgress(), force=False)
    return Made(folder, models)


@pytest.fixture(scope="module")
def both(made: Made) -> LoweredEngine:
    return made.lower(*KINDS)


def shape_of(kind: str | None, depth: int = LEVELS) -> ModelShape | None:
    return None if not kind else ModelShape(1, depth, depth, kind)


def test_programs_are_the_sum_of_the_drafts(both: LoweredEngine) -> None:
    """Programs are named after the draft; all others, host proposals among them, exist once."""
    steps = [entry for entry, _ in both.programs if entry.kind == "step" and entry.batch == 1]
    drafted = [entry for entry in steps if entry.draft_depth and not entry.host_proposal]
    for kind in KINDS:
        own = [entry for entry in drafted if entry.drafter == kind]
        assert len(own) == 2 * LEVELS
        assert {e.name for e in own if not e.full_logits} == {
            step_name(1, shape_of(kind, depth)) for depth in range(1, LEVELS + 1)
        }
    assert len(drafted) == len(KINDS) * 2 * LEVELS
    assert sum(not e.draft_depth and not e.changes_logits for e in steps) == 4
    assert {entry.drafter for entry in steps if not entry.draft_depth} == {""}


def test_each_draft_has_the_acceptance_that_it_has_alone(made: Made, both: LoweredEngine) -> None:
    """Its steps alternate with steps of the other draft and of all other kinds, three at once."""
    host, turns = PlanHost(both), random.Random(3)
    host.port("ignore_eos").fill_(1)
    target, _ = made.says(KINDS[0])
    roots = [host.admit(row, ids, 38)[0] for row, ids in enumerate(made.prompts)]
    assert roots == [target[ids[-1]] for ids in made.prompts]
    between = (None, "step@4.extends", "step@4.adjusted.extends")
    accepted: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for _ in range(8):
        kind, depth = turns.choice(KINDS), turns.randint(1, LEVELS)
        for way in (*turns.sample(between, turns.randint(0, 1)), shape_of(kind, depth)):
            ends = [row for row in range(3) if host.port("done")[row]]
            for row, step in enumerate(stepped(host, way)[:3]):
                assert step.tokens == following(target, roots[row], step.tokens)
                left = int(host.port("limit")[row]) - int(host.port("length")[row])
                if isinstance(way, ModelShape) and row not in ends and left > LEVELS:
                    assert step.accepted == made.accepted(kind, roots[row], depth)
                    accepted[kind].append(step.accepted)
                roots[row] = [roots[row], *step.tokens][-1]
    assert all({0, 1} < set(found) for found in accepted.values()), accepted


def stepped(host: PlanHost, way: Way) -> list[Step]:
    """Run a step of four. Without a draft, run the one that ingests pending rows if required."""
    full = int(host.port("pending_count").max()) == host.port("pending_tokens").shape[1]
    name = way if isinstance(way, str) else step_name(4, way)
    return host.step(f"{name}.extends" if way is None and full else name)


def following(target: Sequence[int], root: int, tokens: Sequence[int]) -> list[int]:
    """Return as many tokens as these, in the order of the target after a root."""
    found = []
    for _ in tokens:
        root = target[root]
        found.append(root)
    return found


def rows_of(lowered: LoweredEngine, host: PlanHost, group: str, row: int) -> torch.Tensor:
    """Return keys and values of a sequence in a draft's cache.

    Their shape is [2 · layers, positions, heads, width].
    """
    found = lowered.engine_sizes.draft_group(group)
    pool = host.memory.buffer(f"cache:{group}").view(torch.bfloat16).float()
    pool = pool.view(2 * len(found.layers), -1, found.kv_heads, found.page_size, found.k_width)
    pages = host.port(f"page_table.{group}")[row].long()
    return pool[:, pages].transpose(2, 3).flatten(1, 2)


def read_by(lowered: LoweredEngine, prompts: Sequence[list[int]], ways: Sequence[Way]) -> PlanHost:
    """Return a host after these steps, as many as keep every sequence alive."""
    host = PlanHost(lowered)
    host.port("ignore_eos").fill_(1)
    for row, ids in enumerate(prompts):
        host.admit(row, ids, 38)
    for way in ways:
        if host.port("length")[:3].max() < PROMPT + 30:
            stepped(host, way)
    return host


def check_caches(
    several: tuple[LoweredEngine, PlanHost], steady: tuple[LoweredEngine, PlanHost], kind: str
) -> None:
    """Check that a draft's cache is equal in both engines, except for pending rows."""
    group = next(d.group for d in several[0].parts.drafts.values() if d.drafter == kind)
    groups = group, group if kind in steady[0].parts.drafts else "draft"
    for row in range(3):
        ends = [
            int(host.port("length")[row]) - int(host.port("pending_count")[row])
            for _, host in (several, steady)
        ]
        assert min(ends) > PROMPT + 8
        found, expected = (
            rows_of(lowered, host, group, row)[:, : min(ends)]
            for (lowered, host), group in zip((several, steady), groups, strict=True)
        )
        assert found.abs().amin((0, 2, 3)).max() > 0
        torch.testing.assert_close(found, expected, atol=NEAR, rtol=NEAR)


def in_turns(kinds: Sequence[str]) -> list[Way]:
    """Return each draft after every other one, and after steps without one."""
    turns: list[Way] = [shape_of(kind) for kind in kinds]
    return [*turns, None, *turns[::-1], "step@4.extends", *turns, None, None, None, *turns]


def test_a_cache_equals_that_of_always_drafting(made: Made, both: LoweredEngine) -> None:
    """Each draft's cache has every token as its own steps would write it."""
    several = both, read_by(both, made.prompts, in_turns(KINDS))
    for kind in KINDS:
        check_caches(several, (both, read_by(both, made.prompts, [shape_of(kind)] * 40)), kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_equals_that_of_an_engine_with_one_draft(
    made: Made, both: LoweredEngine, kind: str
) -> None:
    alone = made.lower(kind)
    several = both, read_by(both, made.prompts, in_turns(KINDS))
    check_caches(several, (alone, read_by(alone, made.prompts, [CHAIN] * 40)), kind)


@pytest.mark.slow
def test_three_random_drafts_have_the_caches_of_engines_with_one(tmp_path: Path) -> None:
    """Two read other layers than the first, in another order. One attends to a block."""
    write_target(tmp_path / "target", layers=4, head_dim=32)
    write_draft(tmp_path / "eagle3", aux_layers=(2, 1))
    write_p_eagle(tmp_path / "p-eagle", layers=2)
    write_dflash(tmp_path / "dflash", dtype=torch.bfloat16)
    kinds = ("eagle3", "p-eagle", "dflash")
    prompts = [[7, 50, 9] * 8, [3, 4, 200, 41, 8, 90] * 4, [16, 77, 30, 31] * 6]

    def lowered(*kinds: str) -> LoweredEngine:
        return lowered_engine(
            tmp_path / "target", tuple(tmp_path / kind for kind in kinds), **SIZES
        )

    together = lowered(*kinds)
    assert [d.columns for d in together.parts.drafts.values()] == [(0, 1), (2, 0, 3), (2, 0, 3)]
    several = together, read_by(together, prompts, [*in_turns(kinds)] * 2)
    for kind in kinds:
        alone = lowered(kind)
        check_caches(several, (alone, read_by(alone, prompts, [CHAIN] * 40)), kind)


@dataclass
class Turns:
    """Alternate chains of several models, and steps without one; record the results."""

    seed: int
    max_depth: int = LEVELS
    reason: str = "in turns"
    outcomes: list[StepOutcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def shape(self, step_context: StepContext) -> DraftShape | None:
        del step_context
        return shape_of(self.random.choice((*KINDS, None)))

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)

    def expected(self, made: Made, root: int) -> list[int]:
        """Return what each step accepts for a single sequence with the first token ``root``."""
        target, _ = made.says(KINDS[0])
        found = []
        for outcome in self.outcomes:
            kind = "" if outcome.shape is None else model_of(outcome.shape)
            found.append(made.accepted(kind, root, outcome.depths[0]) if kind else 0)
            root = following(target, root, range(found[-1] + 1))[-1]
        return found


def engine_of(lowered: LoweredEngine) -> tuple[Engine, InterpretedRunner]:
    drafters = tuple(
        RECORDS[draft.drafter](cache_group=draft.group, roles=(), geometry=draft.geometry)  # type: ignore[arg-type]
        for draft in lowered.parts.drafts.values()
    )
    return engine_of_programs(lowered, drafters=drafters, draft_default=CHAIN)


PARAMS = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafter", [pytest.param("eagle3", marks=pytest.mark.slow), "p-eagle"])
def test_a_run_uses_one_draft(made: Made, both: LoweredEngine, drafter: str, count: int) -> None:
    engine, runner = engine_of(both)
    batch = made.prompts[:count]
    result = run(engine, batch, PARAMS, drafter=drafter, speculation=CHAIN)
    for ids, record in zip(batch, result.records, strict=True):
        assert list(record.prompt_ids) == ids
        expected = expected_histogram(record, *made.says(drafter), LEVELS)
        assert list(record.stats.acceptance_histogram) == expected
    drafted = {name.split(".")[1] for name in runner.started if name.count("-") > 2}
    assert all(name.startswith(drafter) for name in drafted) and drafted


def test_auto_tries_each_draft_without_measured_costs(made: Made, both: LoweredEngine) -> None:
    engine, _ = engine_of(both)
    plain, auto = (run(engine, made.prompts[:1], PARAMS, drafter=d).ids for d in ("none", "auto"))
    policy = engine.default_draft
    assert auto == plain and "measured while decoding" in policy.reason
    assert [*dict.fromkeys(map(model_of, policy._model_policy._costs.shapes))] == [*KINDS]


@pytest.mark.parametrize("seed", [5, pytest.param(6, marks=pytest.mark.slow)])
def test_the_draft_may_change_at_any_step_and_after_cached_prefixes(
    made: Made, both: LoweredEngine, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    policy = Turns(seed)
    monkeypatch.setattr(DeviceDecoder, "_default_policy", lambda *_, **__: policy)
    engine, _ = engine_of(both)
    engine = Engine(engine.manifest, engine.executor, CACHING)
    target, _ = made.says(KINDS[0])
    (ids, *_) = made.prompts
    for cached in (0, 16):
        policy.outcomes.clear()
        (record,) = run(engine, [ids], PARAMS).records
        assert record.stats.cached_tokens == cached
        tokens = list(record.output_ids)
        assert tokens == following(target, ids[-1], tokens)
        accepted = [outcome.accepted[0] for outcome in policy.outcomes]
        assert accepted == policy.expected(made, tokens[0])
        used = {model_of(o.shape) if o.shape else "" for o in policy.outcomes}
        assert used == {"", *KINDS}
    assert engine.prefixes is not None
    engine.prefixes.check_integrity()


@pytest.mark.parametrize("fast", KINDS)
def test_the_draft_is_selected_by_measured_times(
    made: Made, both: LoweredEngine, monkeypatch: pytest.MonkeyPatch, fast: str
) -> None:
    engine, runner = engine_of(both)
    shapes = [shape_of(kind, depth) for kind in KINDS for depth in range(1, LEVELS + 1)]
    steps = [ShapeCosts(4, 0, 0, 0, (64,), (0.01,), (0.0,))]
    steps += [
        ShapeCosts(4, 1, shape.draft_depth, shape.draft_tokens, (64,), (time_s,), (0.0,),
                   drafter=shape.drafter)
        for shape in shapes if shape is not None
        for time_s in (0.011 if shape.drafter == fast else 0.05,)
    ]  # fmt: skip
    monkeypatch.setattr(engine.decoder, "_step_costs", StepCosts("GPU", "", METHOD, tuple(steps)))
    (record,) = run(engine, made.prompts[:1], PARAMS).records
    target, _ = made.says(KINDS[0])
    tokens = list(record.output_ids)
    assert tokens == following(target, made.prompts[0][-1], tokens)
    assert f"of {fast}: " in engine.default_draft.reason
    assert any(name.startswith(f"step@1.{fast}-") for name in runner.started)
    other = next(kind for kind in KINDS if kind != fast)
    run(engine, made.prompts[:1], PARAMS, drafter=other)
    assert fast not in engine.default_draft.reason


@pytest.mark.slow
def test_alternating_drafts_with_several_sequences(
    made: Made, both: LoweredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceDecoder, "_default_policy", lambda *_, **__: Turns(7))
    engine, _ = engine_of(both)
    target, _ = made.says(KINDS[0])
    batch = [*made.prompts, made.prompts[0][:9]]
    for ids, tokens in zip(batch, run(engine, batch, PARAMS).ids, strict=True):
        assert tokens == following(target, ids[-1], tokens)


def test_a_shape_applies_to_the_first_draft_by_default(made: Made, both: LoweredEngine) -> None:
    engine, runner = engine_of(both)
    few = replace(PARAMS, max_new_tokens=3)
    run(engine, made.prompts[:1], few, speculation=DraftShape(1, 2, 2))
    assert step_name(1, shape_of("eagle3", 2)) in runner.started
    run(engine, made.prompts[:1], few, speculation=DraftShape(1, 2, 2), drafter="p-eagle")
    assert step_name(1, shape_of("p-eagle", 2)) in runner.started
    with pytest.raises(RequestError, match="no steps for the draft 1x3x2 of p-eagle"):
        run(engine, made.prompts[:1], few, speculation=DraftShape(1, 3, 2), drafter="p-eagle")
    with pytest.raises(RequestError, match="use one of auto, eagle3, p-eagle, none"):
        run(engine, made.prompts[:1], few, drafter="mtp")
