"""DSA on the example model: every combination runs, and the checks report the loss.

The indexers are the attention's own projections, summed over heads, without training.
"""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

import pytest
from indexer_files import write_derived_indexers
from latent_files import write_factors

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.records import RunStats
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

# The first test builds the engines.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-gpt-oss"
CONTEXT, NEW_TOKENS = 600, 40
SHAPES = {"no draft": None, "chain": DraftShape(1, 3, 3), "tree": DraftShape(3, 4, 12)}
# A view holds 32 tokens of sink, 256 retrieved, 128 of window.
SPECPV = {
    "specpv": True,
    "specpv_n_retrieval_blocks": 16,
    "specpv_partial_threshold": 256,
    "specpv_full_refresh_interval": 12,
}
FULL, SLIDING = range(1, 24, 2), range(0, 24, 2)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    """Engines by cache contents: keys and values, latents in windows, latents in all layers."""
    root = tmp_path_factory.mktemp("dsa-example")
    engines_by_name = {}
    for name, latents, options in (
        ("keys and values", (), SPECPV),
        ("latent windows", SLIDING, SPECPV),
        ("latents", (*FULL, *SLIDING), {**SPECPV, "specpv_score": "indexer"}),
    ):
        model = root / name
        model.mkdir()
        for file in (EXAMPLE / "target").iterdir():
            (model / file.name).symlink_to(file)
        weights = EXAMPLE / "target" / "model.safetensors"
        write_derived_indexers(model, weights, FULL, width=64)
        if latents:
            write_factors(model, weights, latents, rank=96)
        build_options = BuildOptions.from_flat(
            model=model, draft=EXAMPLE / "draft", output=root / f"{name} engine", max_seq_len=1024,
            max_batch_size=2, dsa=True, dsa_top_k=1024, dsa_threshold=256, dsa_check_interval=8,
            dsa_recent_tokens=32, **options,
        )  # fmt: skip
        build(build_options, SilentProgress())
        engines_by_name[name] = Engine.load(build_options.output)
    return engines_by_name


def prompt(engine: Engine) -> Prompt:
    assert engine.text is not None
    ids = engine.text.encode(inspect.getsource(textwrap), raw=True, most_tokens=1 << 15)
    return Prompt("text", prompt_ids=tuple(ids[:CONTEXT]))


def decode(
    engine: Engine, shape: DraftShape | None, top_k: int, blocks: int | None
) -> tuple[tuple[int, ...], tuple[float, ...], RunStats]:
    params = GenerateParams(
        max_new_tokens=NEW_TOKENS,
        ignore_eos=True,
        dsa_top_k=top_k,
        specpv_retrieval_blocks=blocks,
    )
    *_, last = engine.generate([prompt(engine)], params, speculation=shape)
    assert isinstance(last, FinishEvent) and last.record.logprobs is not None
    return last.record.output_ids, last.record.logprobs, last.record.stats


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("views", [0, None], ids=["whole", "views"])
@pytest.mark.parametrize("caches", ["keys and values", "latent windows", "latents"])
def test_every_combination_of_lossy_methods_runs(
    engines: dict[str, Engine], caches: str, views: int | None, shape: str
) -> None:
    """Selecting all tokens has the bits of full attention.

    Selecting a quarter mostly agrees with it.
    """
    engine = engines[caches]
    whole = decode(engine, SHAPES[shape], 0, views)
    chosen = decode(engine, SHAPES[shape], 1024, views)
    assert chosen[:2] == whole[:2]
    quarter = decode(engine, SHAPES[shape], CONTEXT // 4, views)
    stats = quarter[2].dsa
    assert stats is not None and stats.agreement is not None
    print(f"\n{caches}, {shape}, views {views}: {stats}")
    assert stats.broken_lists == 0 and stats.checked_steps >= 8
    assert stats.narrowed_steps + stats.fallback_steps + stats.checked_steps == quarter[2].steps
    assert stats.agreement > 0.7
    if views is None:
        assert quarter[2].specpv is not None and quarter[2].specpv.partial_steps > 4
