"""An assistant of Gemma 4 on a GPU: it drafts by its rules, and changes no bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from example_engine import every_other_sampled, on_gpu, outputs, random_prompts, records
from synthetic_chains import expected_histogram
from synthetic_models import MAX_SEQ_LEN, run, successors, written_prompts

from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.options import SynthOptions
from specbuild.builder.synth.synth import build_engine, prompts_beside
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import Prompt

BATCH, LEVELS = 4, 4
CHAIN, TREE = DraftShape(1, LEVELS, LEVELS), DraftShape(3, LEVELS, 12)
LENGTHS, TOKENS = (5, 230, 40, 17), 64
# Beyond the window of 64 tokens.
PROMPT_TOKENS = 100


@dataclass(frozen=True)
class Made:
    """A synthetic model with its assistant, the prompts beside it, and its engine on the GPU."""

    model: SynthModel
    prompts: list[Prompt]
    engine: Engine


@pytest.fixture(scope="module", params=["tiny-gemma4", "tiny-gemma4-moe"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Made]:
    """Layers that share caches and have inputs of their own, with an assistant whose head reads
    clusters; experts beside a feed-forward, with a plain head.
    """
    model = SynthModel(
        SynthOptions(
            request.param, acceptance=0.78, draft_kind="gemma4-assistant", prompts=BATCH,
            prompt_tokens=PROMPT_TOKENS,
        )
    )  # fmt: skip
    options = BuildOptions(
        model=Path(request.param),
        output=tmp_path_factory.mktemp("assistant") / "engine",
        backend="cuda",
        limits=LimitOptions(max_seq_len=max(MAX_SEQ_LEN, 512), max_batch_size=BATCH),
        drafting=DraftOptions(top_k=TREE.draft_top_k, depth=LEVELS, tokens=TREE.draft_tokens),
    )
    build_engine(model, options, SilentProgress())
    with on_gpu(options.output) as engine:
        yield Made(model, written_prompts(prompts_beside(options.output)), engine)


def test_chains_are_accepted_where_the_rules_agree(made: Made) -> None:
    target, draft = successors(made.model)
    for record in run(made.engine, made.prompts, CHAIN):
        expected = expected_histogram(record, target, draft, LEVELS)
        assert list(record.stats.acceptance_histogram) == expected


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_draft_and_neighbours_change_no_bit(made: Made, shape: DraftShape) -> None:
    """Greedy and sampled, alone and together: tokens and log-probabilities."""
    vocab = made.model.target.vocab
    prompts, params = random_prompts(vocab, LENGTHS), every_other_sampled(len(LENGTHS), TOKENS)
    pairs = list(zip(prompts, params, strict=True))
    plain = [outputs(records(made.engine, [p], [asked], None))[0] for p, asked in pairs]
    alone = [outputs(records(made.engine, [p], [asked], shape))[0] for p, asked in pairs]
    assert alone == plain
    assert outputs(records(made.engine, prompts, params, shape)) == plain
