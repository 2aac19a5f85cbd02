"""Several draft models in one engine on a GPU: no bit changes, and each follows its rules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_engine import on_gpu, outputs, records
from synthetic_chains import expected_histogram
from synthetic_models import MAX_SEQ_LEN, successors, tiny

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.model import SynthModel
from specbuild.runtime.decode.device.decoder import DeviceDecoder
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.draft_models import ModelShape, model_of
from specbuild.runtime.draft.policy import StepOutcome
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.measure.step_measurement import measure_step_costs
from specbuild.runtime.request import GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.settings import RuntimeSettings

# A synthetic DFlash is right if it can read the target's embedding, unlike an EAGLE3 draft: here
# most of its tokens are wrong.
KINDS, RULED = ("eagle3", "p-eagle", "dflash"), ("eagle3", "p-eagle")
LEVELS, BATCH, TOKENS, PROMPT_TOKENS = 4, 6, 160, 200


class Turns:
    """In every step a chain of another model and length, or none; records the results."""

    max_depth, reason = LEVELS, "in turns"

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.outcomes: list[StepOutcome] = []

    def shape(self, step_context: StepContext) -> DraftShape | None:
        del step_context
        kind, depth = self.random.choice((*KINDS, None)), self.random.randint(1, LEVELS)
        return None if kind is None else ModelShape(1, depth, depth, kind)

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)


@pytest.fixture(scope="module")
def models() -> dict[str, SynthModel]:
    """One target and three drafts with the same rules, and equal probabilities of being right."""
    return {kind: tiny(0.78, draft_kind=kind, prompt_tokens=PROMPT_TOKENS) for kind in KINDS}


@pytest.fixture(scope="module")
def engine(
    models: dict[str, SynthModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    target, *_ = models[KINDS[0]].checkpoints()
    drafts = tuple(draft for model in models.values() for draft in model.checkpoints()[1])
    options = BuildOptions(
        model=Path("tiny"),
        output=tmp_path_factory.mktemp("draft-models") / "engine",
        backend="cuda",
        limits=LimitOptions(max_seq_len=MAX_SEQ_LEN, max_batch_size=BATCH),
        drafting=DraftOptions(top_k=1, tokens=LEVELS),
    )
    build(options, SilentProgress(), checkpoints=(target, drafts))
    with on_gpu(options.output) as loaded:
        yield loaded


def texts(models: dict[str, SynthModel], count: int) -> list[Prompt]:
    """Return prompts of several lengths, so that sequences begin and end at different steps."""
    ids = models[KINDS[0]].prompts()
    return [
        Prompt(str(i), tuple(ids[i % len(ids)][: PROMPT_TOKENS - 17 * i])) for i in range(count)
    ]


def in_turns(engine: Engine, patch: pytest.MonkeyPatch, seed: int) -> Turns:
    policy = Turns(seed)
    assert isinstance(engine.decoder, DeviceDecoder)
    patch.setattr(engine.decoder, "_default_policy", lambda *_, **__: policy)
    return policy


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("count", [1, 3, 10])
def test_drafts_change_no_bit(
    engine: Engine,
    models: dict[str, SynthModel],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    temperature: float,
) -> None:
    """Use each draft, the best one, and another one at each step."""
    prompts = texts(models, count)
    expected = [
        GenerateParams(
            max_new_tokens=40 + 29 * i % 120,
            sampling=SamplingParams(temperature, seed=i),
            ignore_eos=True,
        )
        for i in range(count)
    ]
    plain = outputs(records(engine, prompts, expected, drafter="none"))
    for drafter in (*KINDS, "auto"):
        assert outputs(records(engine, prompts, expected, drafter=drafter)) == plain, drafter
    policy = in_turns(engine, monkeypatch, count)
    assert outputs(records(engine, prompts, expected, drafter="auto")) == plain
    used = {model_of(o.shape) for o in policy.outcomes if isinstance(o.shape, DraftShape)}
    assert used == set(KINDS)


@pytest.mark.parametrize("kind", RULED)
def test_each_draft_has_the_acceptance_of_its_rules(
    engine: Engine, models: dict[str, SynthModel], kind: str
) -> None:
    target, draft = successors(models[kind])
    reference = [GenerateParams(TOKENS)] * BATCH
    chain = DraftShape(1, LEVELS, LEVELS)
    for record in records(engine, texts(models, BATCH), reference, chain, drafter=kind):
        expected = expected_histogram(record, target, draft, LEVELS)
        assert list(record.stats.acceptance_histogram) == expected


@pytest.mark.parametrize("cached", [False, True], ids=["cold", "behind a cached beginning"])
def test_caches_are_complete_whichever_model_drafted(
    engine: Engine, models: dict[str, SynthModel], monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    """With alternating drafts, each accepts as many tokens as if it had drafted all the time."""
    rules = {kind: successors(model) for kind, model in models.items()}
    if cached:
        caching = RuntimeSettings(prefix_caching="on")
        engine = Engine(engine.manifest, engine.executor, caching, text=engine.text)
    for _ in range(1 + cached):
        policy = in_turns(engine, monkeypatch, 9)
        (record,) = records(engine, texts(models, 1), [GenerateParams(TOKENS)], drafter="auto")
    assert not cached or record.stats.cached_tokens > 0
    root, met = record.output_ids[0], set()
    for outcome in policy.outcomes:
        (accepted,), (depth,) = outcome.accepted, outcome.depths
        kind = model_of(outcome.shape) if isinstance(outcome.shape, DraftShape) else KINDS[0]
        target, draft = rules[kind]
        expected, token = 0, root
        while expected < depth and draft[token] == target[token]:
            expected, token = expected + 1, target[token]
        if kind in RULED:
            assert accepted == expected, (kind, depth)
        met.add((kind, accepted))
        for _ in range(accepted + 1):
            root = target[root]
    assert {kind for kind, accepted in met if accepted} >= set(RULED)


def test_steps_of_every_model_are_measured_and_selected(
    engine: Engine, models: dict[str, SynthModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = measure_step_costs(engine, print, budget_s=10.0, repeats=2)
    shapes = costs.shapes()
    assert [*dict.fromkeys(map(model_of, shapes))] == list(KINDS)
    assert all(costs.step_s(shape, batch=1, context=64) for shape in shapes)
    monkeypatch.setattr(engine.decoder, "_step_costs", costs)
    prompts, expected = texts(models, 3), [GenerateParams(TOKENS)] * 3
    plain = outputs(records(engine, prompts, expected, drafter="none"))
    for drafter in ("auto", *KINDS):
        assert outputs(records(engine, prompts, expected, drafter=drafter)) == plain
        reason = engine.default_draft.reason
        assert "measured on" in reason
        assert drafter == "auto" or f"of {drafter}" in reason or "no draft:" in reason
