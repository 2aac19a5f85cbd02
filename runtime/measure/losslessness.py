"""The drafts that are compared with decoding without a draft, and the comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.draft.draft_models import shape_of
from specbuild.runtime.draft.registry import AUTO
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape, Limits
from specbuild.runtime.executors.executor import DeviceExecutor
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams

TREE = DraftShape(draft_top_k=3, draft_depth=4, draft_tokens=10)
CHAIN_DEPTH = 4
# Logits, or scores of tokens, closer than this are decided by the last bits of fp32.
NEAR_TIE = 1e-4

Ids = tuple[int, ...]


def draft_settings(engine: Engine) -> dict[str, DraftSetting]:
    """Return the engine's chains and a tree, by name, and on a GPU its host drafters."""
    limits, models, executor = engine.manifest.limits, engine.manifest.models, engine.executor
    several = len(models) > 1
    first = models[0].kind if several else AUTO
    settings = {name: DraftSetting(shape, first) for name, shape in _shapes(engine).items()}
    for model in models[1:]:
        depth = min(CHAIN_DEPTH, limits.levels_of(model.geometry))
        chain = DraftShape(1, depth, depth)
        settings[f"{model.kind}, chain of {depth}"] = DraftSetting(chain, model.kind)
    if isinstance(executor, DeviceExecutor):
        available = ProgramTable(executor.plan).shapes()
        settings = {
            name: setting
            for name, setting in settings.items()
            if _shape(setting, several=several) in available
        }
        settings |= {d.kind: DraftSetting(drafter=d.kind) for d in engine.manifest.host_drafters}
    return settings


def exact_params(engine: Engine, sampling: SamplingParams, new_tokens: int) -> GenerateParams:
    """Return parameters with exact steps only, also for an engine with lossy modes."""
    return GenerateParams(
        max_new_tokens=new_tokens,
        sampling=sampling,
        ignore_eos=True,
        specpv_retrieval_blocks=None if engine.manifest.specpv is None else 0,
        dsa_top_k=None if engine.manifest.dsa is None else 0,
    )


def compare_runs(
    prompts: Sequence[Ids],
    runs: tuple[Sequence[Ids], Sequence[Ids]],
    gap: Callable[[Ids], float],
) -> tuple[int, int, int]:
    """Return the numbers of compared tokens, of prompts that differ, and of near ties.

    ``gap`` returns the distance of the two best scores after a prefix. Tokens after the first
    difference of a prompt are not compared.
    """
    tokens = differences = near_ties = 0
    for prompt, plain, other in zip(prompts, *runs, strict=True):
        at = first_difference(plain, other)
        if at is not None:
            tokens += at + 1
            close = gap((*prompt, *plain[:at])) < NEAR_TIE
            near_ties += close
            differences += not close
        else:
            tokens += min(len(plain), len(other))
            differences += len(plain) != len(other)
    return tokens, differences, near_ties


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index at which two runs differ; None if one is a prefix of the other."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def _shape(setting: DraftSetting, *, several: bool) -> DraftShape:
    """Return the draft shape of a setting as the program table has it."""
    assert isinstance(setting.speculation, DraftShape) and isinstance(setting.drafter, str)
    return shape_of(setting.drafter if several else "", setting.speculation)


def _shapes(engine: Engine) -> dict[str, DraftShape]:
    """Return chains and a tree within the engine's limits; none if it has no drafter."""
    limits = engine.manifest.limits
    if not engine.manifest.drafters:
        return {}
    levels = limits.levels_of(engine.manifest.draft)
    depth = min(CHAIN_DEPTH, levels)
    shapes = {f"chain of {depth}": DraftShape(1, depth, depth)}
    default = engine.manifest.draft_default
    if default is not None and default.draft_top_k == 1 and default.draft_depth > depth:
        shapes[f"chain of {default.draft_depth}"] = default
    tree = _within(TREE, limits, levels)
    if tree.draft_top_k > 1 and tree.draft_tokens > 1:
        shapes[f"tree of {tree.draft_tokens}"] = tree
    return shapes


def _within(shape: DraftShape, limits: Limits, levels: int) -> DraftShape:
    top_k = min(shape.draft_top_k, limits.draft_top_k)
    depth = min(shape.draft_depth, levels)
    max_nodes = DraftShape(top_k, depth, 1).candidates
    return DraftShape(top_k, depth, min(shape.draft_tokens, limits.draft_tokens, max_nodes))
