"""``specbuild verify``: an engine against transformers and a plain torch draft."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from specbuild.builder.families.checkpoints import OWN_DRAFT, is_own_draft, read_draft, read_target
from specbuild.builder.families.parts.path_draft import ReferenceDraft
from specbuild.builder.families.registry import draft_family, target_family
from specbuild.builder.progress import Progress, SilentProgress
from specbuild.builder.training.self_text import Generation, generate_text
from specbuild.builder.verify.comparison import ROUTING_TIE
from specbuild.builder.verify.engine_probe import EngineProbe
from specbuild.builder.verify.losslessness import NEW_TOKENS, check_losslessness
from specbuild.builder.verify.reference_target import ReferenceTarget
from specbuild.builder.verify.report import VerifyReport
from specbuild.builder.verify.stages import (
    TREE_PARENTS,
    Sample,
    SampleReference,
    StageCheck,
    run_reference,
)
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.errors import SpecbuildError

# The number of redraws of a sample with ambiguous routing, which would show nothing.
DRAWS = 12
TEXTS = (False, True)  # random ids; ids as the target generates them
BEYOND_WINDOW = 24
LONGEST_SAMPLE = 320
PROMPT_LENGTHS = (3, 17, 40)


def verify_engine(
    engine: Path, model: Path, draft: Path | None, progress: Progress
) -> VerifyReport:
    """Compare every stage of ``engine`` with the checkpoints it was built from, and its decoding
    with and without the draft.

    Raises:
        SpecbuildError: the engine is damaged, or was not built from checkpoints of this shape.
    """
    probe = EngineProbe(engine, None if draft is None else _model_of(engine, draft))
    manifest, model_record = probe.manifest, probe.model
    built = None if model_record is None else model_record.geometry
    if draft is not None and built is None:
        raise SpecbuildError(f"{engine}: has no draft to compare with {draft}; leave it out")
    family = None if built is None else draft_family(built.architecture)
    own = family is not None and family.in_target
    if own and draft is not None and not is_own_draft(draft):
        raise SpecbuildError(
            f"{engine}: its draft is an MTP layer of the model, not {draft}; leave --draft out"
        )
    if draft is None and built is not None and not own:
        progress.note("no draft checkpoint given: the draft's stages are not compared")
    target = ReferenceTarget(model, manifest.limits.max_seq_len)
    _check_same_model(engine, manifest, model, target)
    reference_draft: ReferenceDraft | None = None
    draft_path = model if own else draft
    if family is not None and draft_path is not None:
        reference_draft = family.reference(draft_path, target.model, built, engine)
    rows = StageCheck(probe, reference_draft)
    progress.start("stages", len(TEXTS), "samples")
    for seed, text_like in enumerate(TEXTS):
        rows.check(*_sample(manifest, target, seed=seed, text_like=text_like))
        progress.advance(1)
    loaded = Engine.load(engine)
    prompts = _prompts(manifest, target)
    losslessness = check_losslessness(loaded, target, prompts, progress)
    stages = rows.comparison.rows()
    passed = all(row.passed for row in stages) and all(row.passed for row in losslessness)
    return VerifyReport(rows=stages, losslessness=losslessness, passed=passed)


def _model_of(engine: Path, draft: Path) -> str | None:
    """Return the kind of a checkpoint among several draft models; None for a single one.

    Raises SpecbuildError if it is none of them.
    """
    manifest = read_manifest(engine)
    kinds = [model.kind for model in manifest.models]
    if len(kinds) < 2:
        return None
    kind = OWN_DRAFT
    if not is_own_draft(draft):
        kind = read_draft(draft, manifest.target, strict=False).record.kind
    if kind not in kinds:
        raise SpecbuildError(
            f"{engine}: has drafts of kind {' and '.join(kinds)}, {draft} is of {kind}; give one "
            "that it was built from"
        )
    return kind


def _sample(
    manifest: Manifest, target: ReferenceTarget, *, seed: int, text_like: bool
) -> tuple[Sample, SampleReference]:
    """Return tokens that exceed the window and have clear routing, with their reference."""
    limits = manifest.limits
    # An engine without a draft verifies no trees: its "tree" is the one token it decodes.
    nodes = len(TREE_PARENTS) if limits.draft_tokens else 1
    length = min(
        manifest.target.sliding_window + BEYOND_WINDOW,
        LONGEST_SAMPLE,
        limits.max_rows,
        limits.max_seq_len - nodes - 1,
    )
    best: tuple[Sample, SampleReference] | None = None
    for draw in range(DRAWS):
        tokens = _tokens(target, length + nodes, seed=seed * DRAWS + draw, text_like=text_like)
        sample = Sample(ids=tokens[:length], tree=tokens[length:])
        reference = run_reference(target, sample)
        if best is None or reference.routing_margin > best[1].routing_margin:
            best = sample, reference
        if reference.routing_margin >= ROUTING_TIE:
            break
    assert best is not None
    return best


def _tokens(target: ReferenceTarget, count: int, *, seed: int, text_like: bool) -> np.ndarray:
    random = np.random.default_rng(seed)
    vocab = target.model.config.vocab_size
    if not text_like:
        return random.integers(0, vocab, count)
    start = torch.from_numpy(random.integers(0, vocab, (1, 1)))
    generation = Generation(new_tokens=count - 1, temperature=1.0, seed=seed)
    ids, _ = generate_text(target.model, start, generation, SilentProgress())
    return ids[0].numpy()


def _prompts(manifest: Manifest, target: ReferenceTarget) -> list[tuple[int, ...]]:
    """Return short prompts, random and generated by the target, with capacity for the output."""
    max_tokens = max(1, manifest.limits.max_seq_len - NEW_TOKENS)
    return [
        tuple(_tokens(target, min(length, max_tokens), seed=100 + i, text_like=text_like).tolist())
        for i, (length, text_like) in enumerate((n, t) for n in PROMPT_LENGTHS for t in TEXTS)
    ]


def _check_same_model(
    engine: Path, manifest: Manifest, model: Path, target: ReferenceTarget
) -> None:
    """Give the reference the latents that the engine caches, too."""
    built, dims = manifest.target, manifest.target.latent_dims
    retrofit_targets = bool(dims) and target_family(built.model_type).retrofits
    if built.dtype is not None or manifest.lossy_groups:
        raise SpecbuildError(
            f"{engine}: its weights, or its keys and values, are rounded to fewer bytes, so "
            "transformers computes another model; hold it against an exact engine with compare"
        )
    quantized = manifest.quantized
    if quantized is not None and quantized.kernels and quantized.math == "fast":
        raise SpecbuildError(
            f"{engine}: its products round activations to int8, which transformers does not; build "
            "it with --cpu-math exact, or compare it with such an engine (specbuild compare)"
        )
    checkpoint = read_target(model, strict=False, mla=retrofit_targets, dsa=False)
    given = checkpoint.geometry
    if _sizes(built) != _sizes(given):
        raise SpecbuildError(
            f"{engine}: was built from a model of (type, layers, hidden, vocabulary, experts) "
            f"{_sizes(built)}, but {model} has {_sizes(given)}; give the model it was built from"
        )
    if not retrofit_targets:
        return
    if given.latent_dims != dims:
        raise SpecbuildError(
            f"{engine}: caches latents of {list(dims)} values, but those beside {model} have "
            f"{list(given.latent_dims)}; give the model it was built from"
        )
    target.use_latents(dims, checkpoint.tensors)


def _sizes(g: TargetGeometry) -> tuple[str, int, int, int, int]:
    return g.model_type, g.layers, g.hidden, g.vocab, 0 if g.moe is None else g.moe.experts
