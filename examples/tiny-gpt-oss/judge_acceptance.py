"""Tokens a step of the draft with each of several files of heads (docs/smaller-caches.md).

A chain of three, greedy, on the CPU target: prompts.jsonl with and without each file of latents,
and starts of held-out text of --context tokens for each --top-k of indexers, without the checks
that engines make: those steps emit what attention to everything gives.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from specbuild.builder.build import build
from specbuild.builder.checkpoint.indexers import INDEXER_FILE
from specbuild.builder.checkpoint.latents import LATENT_FILE
from specbuild.builder.checkpoint.source import SIDE_FILES
from specbuild.builder.options import BuildOptions, DraftOptions, DsaOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.settings import RuntimeSettings

HERE = Path(__file__).parent
COUNTS = (12, 40)  # prompts that a line is about
CHAIN = DraftShape(draft_top_k=1, draft_depth=3, draft_tokens=3)


def engine_with(file: Path | None, beside_as: str, options: BuildOptions) -> Engine:
    """An engine of the model with ``file`` alone beside it, under the name that builds look for."""
    with TemporaryDirectory() as folder:
        model = Path(folder) / "target"
        model.mkdir()
        for own in options.model.iterdir():
            if own.name not in SIDE_FILES:
                (model / own.name).symlink_to(own.resolve())
        if file is not None:
            (model / beside_as).symlink_to(file.resolve())
        output = Path(folder) / "engine"
        build(replace(options, model=model, output=output), SilentProgress())
        return Engine.load(output, RuntimeSettings(device="cpu"))


def decoded(
    engine: Engine, prompts: Sequence[Prompt], params: GenerateParams
) -> list[tuple[int, int]]:
    """Of each prompt the tokens that target passes emitted behind it, and these passes."""
    return [
        (event.record.stats.output_tokens - 1, event.record.stats.steps)
        for prompt in prompts
        for event in engine.generate([prompt], params, speculation=CHAIN)
        if isinstance(event, FinishEvent)
    ]


def tokens_a_step(result: Sequence[tuple[int, int]]) -> str:
    """The tokens that a target pass emits, with their standard error over the prompts."""
    tokens, steps = np.array(result).T
    mean = tokens.sum() / steps.sum()
    error = np.std(tokens - mean * steps, ddof=1) * len(result) ** 0.5 / steps.sum()
    return f"{mean:.3f} ± {error:.3f} tokens a step ({steps.sum()} steps)"


def example_prompts() -> list[Prompt]:
    """The example's held-out prompts."""
    lines = (HERE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [Prompt(r["id"], None, r["prompt"]) for r in map(json.loads, lines)]


def judge_latents(files: Sequence[Path], options: BuildOptions, params: GenerateParams) -> None:
    """Two lines a file: the first twelve prompts, and all."""
    for file in [None, *files]:
        engine = engine_with(file, LATENT_FILE, options)
        result = decoded(engine, example_prompts(), params)
        for count in COUNTS:
            of_these = tokens_a_step(result[:count])
            print(f"{file or 'the model itself'}, {count} prompts: {of_these}", flush=True)


def judge_indexers(
    file: Path,
    top_k: Sequence[int],
    prompts: Sequence[Prompt],
    options: BuildOptions,
    params: GenerateParams,
) -> None:
    """One line for each number of chosen tokens, 0 for attention to everything."""
    dsa_options = DsaOptions(enabled=True, threshold=0, top_k=max(top_k), check_interval=0)
    options = replace(options, dsa=dsa_options)
    engine = engine_with(file, INDEXER_FILE, options)
    for k in (0, *top_k):
        result = decoded(engine, prompts, replace(params, dsa_top_k=k))
        print(f"{file}, {k or 'all'} chosen: {tokens_a_step(result)}", flush=True)


def main() -> None:
    """Latents first, then indexers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=HERE / "target")
    parser.add_argument("--draft", type=Path, default=HERE / "draft")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--indexer", type=Path, help="dsa_indexer.safetensors")
    parser.add_argument("--text", type=Path, help="token ids (.npy), which --indexer reads")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each start")
    parser.add_argument("--starts", type=int, default=40)
    parser.add_argument("--top-k", type=int, action="append", help="tokens chosen; repeatable")
    parser.add_argument("files", type=Path, nargs="*", help="files of latents")
    args = parser.parse_args()
    if args.indexer is not None and not (args.text and args.top_k):
        parser.error("--indexer needs --text and --top-k")
    options = BuildOptions(
        model=args.model,
        draft=args.draft,
        output=Path(),
        drafting=DraftOptions(top_k=1, depth=3, tokens=3),
    )
    params = GenerateParams(max_new_tokens=args.max_new_tokens)
    if args.files:
        judge_latents(args.files, options, params)
    if args.indexer is not None:
        ids = np.load(args.text)
        firsts = np.linspace(0, len(ids) - args.context, args.starts).astype(int)
        starts = [Prompt(str(i), tuple(ids[i : i + args.context].tolist())) for i in firsts]
        judge_indexers(args.indexer, args.top_k, starts, options, params)


if __name__ == "__main__":
    main()
