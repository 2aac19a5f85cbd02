"""P-EAGLE in a CUDA engine's programs, by the plan's interpreter: one pass, a chain or a tree."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from checkpoints import write_target
from draft_rounds import likeliest
from drafted_programs import watched
from p_eagle_drafts import write_p_eagle
from plan_host import PlanHost, lowered_engine, step_name, stored
from synthetic_models import successors, tiny

from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.backends.cuda.step.programs import fits
from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.synth import write_checkpoints
from specbuild.runtime.engine_dir.manifest import DraftShape

LEVELS, TOKENS = 6, 40
LONG, SHORT, TREE = DraftShape(1, LEVELS, LEVELS), DraftShape(1, 2, 2), DraftShape(2, LEVELS, 9)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """A model whose drafts are right where its rules agree, and its engine's programs."""
    model = tiny(0.78, draft_kind="p-eagle", layers=2)
    path = tmp_path_factory.mktemp("synth") / "checkpoints"
    write_checkpoints(model, path, SilentProgress(), force=False)
    return model, lower(path, LONG)


def lower(path: Path, built_for: DraftShape) -> LoweredEngine:
    return lowered_engine(
        path / "target", path / "draft", max_seq_len=128, max_batch_size=2, page_size=16,
        **dataclasses.asdict(built_for),
    )  # fmt: skip


@pytest.mark.parametrize("shape", [LONG, SHORT], ids=str)
def test_steps_accept_where_the_rules_agree(made, shape: DraftShape) -> None:
    """Every position of a pass, after prompts and after steps that accepted any number."""
    model, lowered = made
    target, draft = successors(model)
    host = PlanHost(lowered)
    host.port("ignore_eos").fill_(1)
    prompts = model.prompts()[:2]
    roots = [host.admit(row, ids, TOKENS)[0] for row, ids in enumerate(prompts)]
    assert roots == [target[ids[-1]] for ids in prompts]
    seen = set()
    for _ in range(6):
        for row, step in enumerate(host.step(step_name(2, shape))):
            expected, token = 0, roots[row]
            while expected < shape.draft_depth and draft[token] == target[token]:
                expected, token = expected + 1, target[token]
            assert step.accepted == expected
            for emitted in step.tokens:
                assert emitted == target[roots[row]]
                roots[row] = emitted
            seen.add(step.accepted)
    assert len(seen) > 1


def test_steps_without_a_draft_leave_its_cache_right(made) -> None:
    """Rows that were taken up beside a plain step draft as those of any other."""
    model, lowered = made
    target, draft = successors(model)
    host = PlanHost(lowered)
    host.port("ignore_eos").fill_(1)
    prompts = model.prompts()[2:4]
    roots = [host.admit(row, ids, TOKENS)[0] for row, ids in enumerate(prompts)]
    for name in ("step@2", "step@2", "step@2.extends", step_name(2, LONG)):
        steps = host.step(name)
        for row, step in enumerate(steps):
            for emitted in step.tokens:
                assert emitted == target[roots[row]]
                before, roots[row] = roots[row], emitted
            if name != step_name(2, LONG):
                continue
            expected, token = 0, prompts[row][-1]
            for _ in range(4):  # the first token, and one of each plain step
                token = target[token]
            while expected < LEVELS and draft[token] == target[token]:
                expected, token = expected + 1, target[token]
            assert step.accepted == expected
            assert before in target


def test_a_pass_makes_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best nodes by the logits of its levels, of which what the target says is accepted."""
    model = tiny(0.5, draft_kind="p-eagle", layers=2)
    write_checkpoints(model, tmp_path / "made", SilentProgress(), force=False)
    lowered = lower(tmp_path / "made", TREE)
    target, _ = successors(model)
    host, drafted = PlanHost(lowered), watched(monkeypatch)
    host.port("ignore_eos").fill_(1)
    prompts = model.prompts()[:2]
    roots = [host.admit(row, ids, TOKENS)[0] for row, ids in enumerate(prompts)]
    offsets = stored(lowered.weights["d2t"]).long()
    ids = torch.arange(len(offsets)) + offsets
    accepted = 0
    for shape in (TREE, DraftShape(1, 4, 4), TREE, SHORT, TREE):
        for row, step in enumerate(host.step(step_name(2, shape))):
            logits = drafted.logits.view(2, shape.draft_depth, -1)[row]
            paths = drafted.paths(row)
            assert paths == likeliest(logits, ids, shape)
            right: list[int] = []
            while (*right, following(target, roots[row], right)) in paths:
                right.append(following(target, roots[row], right))
            assert step.tokens == [*right, following(target, roots[row], right)]
            assert step.accepted == len(right)
            roots[row], accepted = step.tokens[-1], accepted + len(right)
    assert accepted


def following(target: dict[int, int], root: int, path: list[int]) -> int:
    """The target's token behind a root and a path of its own tokens."""
    return target[path[-1] if path else root]


def test_mask_rows_bound_the_batch(tmp_path: Path) -> None:
    """Rows that wait and mask rows share a launch."""
    sizes = {"hidden": 96, "q_heads": 6, "kv_heads": 2, "head_dim": 32}
    write_target(tmp_path / "target", layers=2, **sizes)
    write_p_eagle(tmp_path / "draft", target_layers=2, target_hidden=96, inner=64, **sizes)
    target = read_target(tmp_path / "target", strict=True).geometry
    draft = read_draft(tmp_path / "draft", target, strict=True).geometry
    assert fits(16, LONG, LEVELS) and fits(16, LONG, LEVELS, draft)
    assert fits(32, LONG, LEVELS) and not fits(32, LONG, LEVELS, draft)
