"""Measures partial views during decoding: agreement and acceptance by context and budget.

Held-out text is the prompt; each is decoded over the full cache and over views of every budget,
with the engine's draft. The output has the share of tokens of partial steps that the full context
selects too, and tokens per step (full: those of the draft alone), with standard errors over
prompts. It also has the tokens per second of ``--batch`` concurrent prompts, from the last one's
first token to the end of all. Prompts are pieces of the text at equal distances: in a text that is
shorter than all of them together they overlap, and the errors are too small. Engines of any target
can be used:

    specbuild build --model examples/tiny-gpt-oss/target --draft examples/tiny-gpt-oss/draft \\
      --max-seq-len 4096 --page-size 16 --draft-window 512 --draft-top-k 1 --draft-depth 3 \\
      --draft-tokens 3 --specpv --specpv-partial-threshold 512 --specpv-n-retrieval-blocks 128 \\
      --output engine
    .venv/bin/python benchmarks/specpv_decoding.py engine --ids out/corpus/held_out.npy \\
      --output benchmarks/results/specpv-decoding.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specbuild.cli.bench.runs import Run, timed_run
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.request import GenerateParams, Prompt
from specbuild.runtime.settings import RuntimeSettings

# More than a view's buffer, so that the step which re-verifies it has run too.
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Setting:
    """Prompts of ``context`` tokens, and views of ``budget`` blocks; 0 means no view."""

    context: int
    budget: int


def prompts(file: Path, context: int, count: int) -> list[Prompt]:
    """Return pieces of token ids [n], at equal distances, each of ``context`` tokens.

    Raises SpecbuildError if the text is shorter than one.
    """
    ids = np.load(file).astype(int)
    if len(ids) <= context:
        raise SpecbuildError(
            f"--contexts {context}: {file} has {len(ids)} tokens, one more than a context is needed"
        )
    starts = np.linspace(0, len(ids) - context - 1, count).astype(int)
    return [
        Prompt(str(start), prompt_ids=tuple(ids[start : start + context].tolist()))
        for start in starts
    ]


def decode(
    engine: Engine,
    inputs: Sequence[Prompt],
    args: Setting,
    *,
    batch: int,
    tokens: int,
    speculation: DraftShape | None,
) -> Iterator[Run]:
    """Decode all prompts greedily, ``batch`` at a time."""
    params = GenerateParams(
        max_new_tokens=tokens, ignore_eos=True, specpv_retrieval_blocks=args.budget
    )
    warm_up(engine, inputs[:batch], params, speculation)
    for at in range(0, len(inputs), batch):
        yield decode_together(engine, inputs[at : at + batch], params, speculation)


def decode_together(
    engine: Engine,
    inputs: Sequence[Prompt],
    params: GenerateParams,
    speculation: DraftShape | None,
) -> Run:
    """Decode a batch; SpecbuildError if some wait until others have ended."""
    run = timed_run(engine, inputs, params, speculation)
    if run.decode_tokens < sum(len(record.output_ids) - 1 for record in run.records):
        raise SpecbuildError(
            f"--batch {len(inputs)}: the engine has no capacity to decode so many prompts together"
        )
    return run


def warm_up(
    engine: Engine,
    inputs: Sequence[Prompt],
    params: GenerateParams,
    speculation: DraftShape | None,
) -> None:
    """Load what the timed runs use, on prompts just long enough for a view.

    A full long prompt takes longer than what is timed after it.
    """
    specpv = engine.manifest.specpv
    assert specpv is not None
    blocks = specpv.n_sink_blocks + specpv.n_window_blocks + specpv.n_retrieval_blocks + 1
    long = max(specpv.partial_threshold + 1, blocks * specpv.block_size)
    cut = [replace(prompt, prompt_ids=(prompt.prompt_ids or ())[:long]) for prompt in inputs]
    few = min(params.max_new_tokens, specpv.n_spec_tokens_buf + WARM_UP_TOKENS)
    decode_together(engine, cut, replace(params, max_new_tokens=few), speculation)


def check_asked(manifest: Manifest, inputs: argparse.Namespace) -> None:
    """Raise SpecbuildError for what the engine would refuse or truncate, before anything runs."""
    specpv, limits = manifest.specpv, manifest.limits
    if specpv is None:
        raise SpecbuildError(f"{inputs.engine} was built without SpecPV; build it with --specpv")
    if inputs.batch < 1 or inputs.prompts < 1 or inputs.prompts % inputs.batch:
        raise SpecbuildError(
            f"--batch {inputs.batch}: {inputs.prompts} prompts are no whole batches of it"
        )
    if inputs.batch > limits.max_batch_size:
        raise SpecbuildError(f"--batch {inputs.batch}: the engine takes {limits.max_batch_size}")
    if max(inputs.budgets) > specpv.n_retrieval_blocks or min(inputs.budgets) < 0:
        raise SpecbuildError(
            f"--budgets {inputs.budgets}: the engine retrieves 0 to {specpv.n_retrieval_blocks} "
            "blocks"
        )
    if inputs.tokens < 2 or max(inputs.contexts) + inputs.tokens > limits.max_seq_len:
        raise SpecbuildError(
            f"--contexts {inputs.contexts} and --tokens {inputs.tokens}: the engine takes 2 new "
            f"tokens or more, up to {limits.max_seq_len} with their prompt"
        )


def summary(args: Setting, runs: Sequence[Run]) -> dict[str, Any]:
    """Return means over prompts with standard errors; agreement only if tokens were checked."""
    result = [record.stats for run in runs for record in run.records]
    acceptance = [stats.mean_acceptance_length for stats in result]
    views = [s.specpv for s in result if s.specpv is not None and s.specpv.rechecked_tokens]
    tokens = sum(v.rechecked_tokens for v in views)
    shares = [v.agreed_tokens / v.rechecked_tokens for v in views]
    return {
        "context": args.context,
        "budget": args.budget,
        "prompts": len(result),
        "batch": len(runs[0].records),
        "acceptance_length": float(np.mean(acceptance)),
        "acceptance_length_error": _error(acceptance),
        "rechecked_tokens": tokens,
        "agreement": sum(v.agreed_tokens for v in views) / tokens if tokens else None,
        "agreement_error": _error(shares) if tokens else None,
        "partial_steps": sum(v.partial_steps for v in views),
        "full_steps": sum(v.full_steps for v in views),
        "tokens_per_s": float(np.median([run.tokens_per_s for run in runs])),
    }


def _error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0


def line(row: dict[str, Any]) -> str:
    """Return a summary as printed text."""
    agreement = "    –"
    if row["agreement"] is not None:
        agreement = f"{row['agreement']:6.2%} ± {row['agreement_error']:5.2%}"
    return (
        f"{row['context']:7} {row['budget']:6} {row['prompts']:8} {agreement:>16} "
        f"{row['rechecked_tokens']:9} {row['acceptance_length']:12.2f} "
        f"± {row['acceptance_length_error']:.2f} {row['tokens_per_s']:12.1f}"
    )


def main() -> None:
    """Print one row for each context and budget."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--ids", type=Path, required=True, help="token ids [n] of held-out text")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 3900])
    parser.add_argument("--budgets", type=int, nargs="+", default=[0, 4, 8, 16, 32, 64])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1, help="prompts that decode together")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of a prompt")
    parser.add_argument("--threads", type=int, help="of an engine for CPUs (1)")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    inputs = parser.parse_args()
    try:
        measure(inputs)
    except SpecbuildError as error:
        parser.error(str(error))


def measure(inputs: argparse.Namespace) -> None:
    """Measure a row for each context and budget; the file is updated after each."""
    check_asked(read_manifest(inputs.engine), inputs)
    chosen = {context: prompts(inputs.ids, context, inputs.prompts) for context in inputs.contexts}
    engine = Engine.load(inputs.engine, RuntimeSettings(threads=inputs.threads))
    limits = engine.manifest.limits
    shape = None
    if engine.manifest.draft is not None:
        shape = DraftShape(limits.draft_top_k, limits.draft_depth, limits.draft_tokens)
    print("context blocks  prompts        agreement   checked  tokens a step     tokens/s")
    rows = []
    for context in inputs.contexts:
        for budget in inputs.budgets:
            args = Setting(context, budget)
            runs = decode(
                engine,
                chosen[context],
                args,
                batch=inputs.batch,
                tokens=inputs.tokens,
                speculation=shape,
            )
            rows.append(summary(args, list(runs)))
            print(line(rows[-1]), flush=True)
            if inputs.output is not None:
                inputs.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
