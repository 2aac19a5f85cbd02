"""The contract of every drafter in a CUDA engine's programs, run by the plan's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from drafted_programs import Drafted, watched
from drafter_cases import CASES, CUDA_VARIANTS
from drafter_references import Reference
from left_out import slow
from plan_host import PlanHost, lowered_engine, step_name

from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.runtime.engine_dir.manifest import DraftShape

FORMS = {**CASES, **CUDA_VARIANTS}
QUICK = (
    "eagle3",
    "p-eagle",
    "jetspec",
    "mtp of DeepSeek-V3",
    "mtp of Qwen3.5",
    "assistant of Gemma 4 with clusters",
)
CHAIN, SHORT = DraftShape(1, 4, 4), DraftShape(1, 2, 2)
# For bf16 logits against an fp32 reference, relative to the largest.
TOLERANCE = 0.05
PROMPTS = ([7, 20, 9] * 15, [3, 4, 30, 11, 8, 9, 16, 7, 30, 31, 12, 13, 5, 6, 10, 2] * 3)
LONGEST = 64

each_form = pytest.mark.parametrize("name", [*QUICK, *slow(*(n for n in FORMS if n not in QUICK))])


def tree_of(name: str) -> DraftShape:
    """Return the largest tree of an engine: as deep as a case's chain, but at most five levels."""
    return DraftShape(3, min(5, FORMS[name].chain.draft_depth), 9)


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory):
    """Return a function: the programs of a case's engine, created once, and the reference."""

    @cache
    def make(name: str) -> tuple[LoweredEngine, Callable[[], Reference]]:
        folder, tree = tmp_path_factory.mktemp("drafter"), tree_of(name)
        draft, reference = FORMS[name].write(folder, True)
        engine = lowered_engine(
            folder / "model", draft, max_seq_len=LONGEST, max_batch_size=2, page_size=16,
            draft_top_k=tree.draft_top_k, draft_depth=tree.draft_depth,
            draft_tokens=tree.draft_tokens,
        )  # fmt: skip
        return engine, reference

    return make


def captured(lowered: LoweredEngine, ids: list[int]) -> torch.Tensor:
    """Return the target's captured states of tokens, [L, n·H], from the scoring program."""
    host = PlanHost(lowered)
    host.give_pages(0)
    host.score(0, ids)
    return host.port("score.captured")[: len(ids)].float().clone()


def check(
    reference: Reference,
    drafted: Drafted,
    row: int,
    shape: DraftShape,
    states: torch.Tensor,
    ids: list[int],
) -> None:
    """Assert that a chain has the reference's logits, and that nodes are their parents' best."""
    paths, tokens = drafted.paths(row), torch.tensor(ids)
    assert len(paths) == shape.draft_tokens
    deepest = max(paths, key=len)
    draft_ids = {int(token): i for i, token in enumerate(reference.target_ids)}
    if reference.one_pass or shape.draft_top_k == 1:
        expected = reference.follow(states, tokens, deepest[:-1])
        levels = drafted.levels
        # A pass computes all levels of a sequence, or one level of all sequences.
        draft_logits = (
            levels[-1].view(2, shape.draft_depth, -1)[row][: len(expected)]
            if reference.one_pass
            else torch.stack([level[row] for level in levels])
        )
        assert (draft_logits - expected).abs().max() < TOLERANCE * expected.abs().max()
        if shape.draft_top_k == 1:
            assert [draft_ids[token] for token in deepest] == draft_logits.argmax(dim=1).tolist()
    for path in paths:
        logits = reference.follow(states, tokens, path[:-1])[-1]
        least = logits.topk(shape.draft_top_k).values[-1]
        assert logits[draft_ids[path[-1]]] > least - TOLERANCE * logits.abs().max()


@each_form
def test_steps_draft_by_the_published_formulas(
    lowered, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Check every level after prompts, after plain steps, and up to the longest text."""
    engine, reference = lowered(name)[0], lowered(name)[1]()
    host, drafted = PlanHost(engine), watched(monkeypatch)
    host.port("ignore_eos").fill_(1)
    texts = [list(ids) for ids in PROMPTS]
    for row, ids in enumerate(texts):
        ids.append(host.admit(row, ids, LONGEST - len(ids))[0])
    tree = tree_of(name)
    shapes = [CHAIN, tree, None, None, SHORT, "step@2.extends", tree]
    while not host.port("done").all():
        shape = shapes.pop(0) if shapes else CHAIN
        alive = [not host.port("done")[row] for row in range(2)]
        steps = host.step(shape if isinstance(shape, str) else step_name(2, shape))
        for row, step in enumerate(steps):
            if alive[row] and isinstance(shape, DraftShape):
                states = captured(engine, texts[row][:-1])
                check(reference, drafted, row, shape, states, texts[row])
                right = [
                    n
                    for n in range(len(step.tokens))
                    if tuple(step.tokens[:n]) in drafted.paths(row)
                ]
                assert step.accepted == max(right, default=0)
            texts[row] += step.tokens
    assert [len(ids) for ids in texts] == [LONGEST, LONGEST]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@each_form
def test_drafts_change_no_token_of_the_programs(lowered, name: str, temperature: float) -> None:
    engine, _ = lowered(name)
    outputs = []
    for shape in (None, CHAIN, tree_of(name)):
        host = PlanHost(engine)
        host.port("ignore_eos").fill_(1)
        first, _ = host.admit(0, list(PROMPTS[1]), 16, temperature=temperature, seed=5)
        outputs.append([first, *host.generate(0, step_name(1, shape), 15)][:16])
    assert outputs[0] == outputs[1] == outputs[2]


@each_form
def test_no_operand_of_a_program_is_empty(lowered, name: str) -> None:
    """An engine with an empty operand cannot be loaded."""
    engine, _ = lowered(name)
    for _, program in engine.programs:
        for call in engine.writer.program(program).ops:
            for binding in (*call.inputs.values(), *call.outputs.values()):
                assert 0 not in binding.shape, call.op
