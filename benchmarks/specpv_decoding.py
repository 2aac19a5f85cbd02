"""What partial views change while an engine decodes: agreement and acceptance by context, budget.

Held-out text is the prompt; each is decoded over the whole cache and over views of every budget,
with the engine's draft. Printed are how many of the tokens that partial steps emitted the whole
context chooses too, how many tokens a step emits (whole: that of the draft alone), with standard
errors from prompt to prompt, and the tokens a second of ``--batch`` prompts that decode together,
from the last one's first token until all have ended. Prompts are pieces of the text at even
distances: where it is shorter than all of them together they overlap, and the errors are too small.
Engines of any target are taken:

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

# Behind a view's buffer, so that the step which re-verifies it has run too.
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Asked:
    """One setting: prompts of ``context`` tokens, views of ``budget`` blocks (0: no view)."""

    context: int
    budget: int


def prompts(file: Path, context: int, count: int) -> list[Prompt]:
    """Pieces of a text of token ids [n], at even distances, each of ``context`` tokens.

    Raises SpecbuildError where the text is shorter than one.
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
    given: Sequence[Prompt],
    asked: Asked,
    *,
    batch: int,
    tokens: int,
    speculation: DraftShape | None,
) -> Iterator[Run]:
    """All prompts, ``batch`` at a time, decoded greedily."""
    params = GenerateParams(
        max_new_tokens=tokens, ignore_eos=True, specpv_retrieval_blocks=asked.budget
    )
    warm_up(engine, given[:batch], params, speculation)
    for at in range(0, len(given), batch):
        yield decode_together(engine, given[at : at + batch], params, speculation)


def decode_together(
    engine: Engine,
    given: Sequence[Prompt],
    params: GenerateParams,
    speculation: DraftShape | None,
) -> Run:
    """A batch; SpecbuildError where some wait until others have ended."""
    run = timed_run(engine, given, params, speculation)
    if run.decode_tokens < sum(len(record.output_ids) - 1 for record in run.records):
        raise SpecbuildError(
            f"--batch {len(given)}: the engine has no capacity to decode so many prompts together"
        )
    return run


def warm_up(
    engine: Engine,
    given: Sequence[Prompt],
    params: GenerateParams,
    speculation: DraftShape | None,
) -> None:
    """Runs what the timed runs find loaded, on prompts just long enough for a view.

    A whole long prompt takes longer than what is timed behind it.
    """
    specpv = engine.manifest.specpv
    assert specpv is not None
    blocks = specpv.n_sink_blocks + specpv.n_window_blocks + specpv.n_retrieval_blocks + 1
    long = max(specpv.partial_threshold + 1, blocks * specpv.block_size)
    cut = [replace(prompt, prompt_ids=(prompt.prompt_ids or ())[:long]) for prompt in given]
    few = min(params.max_new_tokens, specpv.n_spec_tokens_buf + WARM_UP_TOKENS)
    decode_together(engine, cut, replace(params, max_new_tokens=few), speculation)


def check_asked(manifest: Manifest, given: argparse.Namespace) -> None:
    """SpecbuildError for what the engine would refuse or cut short, before anything runs."""
    specpv, limits = manifest.specpv, manifest.limits
    if specpv is None:
        raise SpecbuildError(f"{given.engine} was built without SpecPV; build it with --specpv")
    if given.batch < 1 or given.prompts < 1 or given.prompts % given.batch:
        raise SpecbuildError(
            f"--batch {given.batch}: {given.prompts} prompts are no whole batches of it"
        )
    if given.batch > limits.max_batch_size:
        raise SpecbuildError(f"--batch {given.batch}: the engine takes {limits.max_batch_size}")
    if max(given.budgets) > specpv.n_retrieval_blocks or min(given.budgets) < 0:
        raise SpecbuildError(
            f"--budgets {given.budgets}: the engine retrieves 0 to {specpv.n_retrieval_blocks} "
            "blocks"
        )
    if given.tokens < 2 or max(given.contexts) + given.tokens > limits.max_seq_len:
        raise SpecbuildError(
            f"--contexts {given.contexts} and --tokens {given.tokens}: the engine takes 2 new "
            f"tokens or more, up to {limits.max_seq_len} with their prompt"
        )


def summary(asked: Asked, runs: Sequence[Run]) -> dict[str, Any]:
    """Means over prompts with standard errors; agreement only where tokens were checked."""
    found = [record.stats for run in runs for record in run.records]
    acceptance = [stats.mean_acceptance_length for stats in found]
    views = [s.specpv for s in found if s.specpv is not None and s.specpv.rechecked_tokens]
    tokens = sum(v.rechecked_tokens for v in views)
    shares = [v.agreed_tokens / v.rechecked_tokens for v in views]
    return {
        "context": asked.context,
        "budget": asked.budget,
        "prompts": len(found),
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
    """A summary as it is printed."""
    agreement = "    –"
    if row["agreement"] is not None:
        agreement = f"{row['agreement']:6.2%} ± {row['agreement_error']:5.2%}"
    return (
        f"{row['context']:7} {row['budget']:6} {row['prompts']:8} {agreement:>16} "
        f"{row['rechecked_tokens']:9} {row['acceptance_length']:12.2f} "
        f"± {row['acceptance_length_error']:.2f} {row['tokens_per_s']:12.1f}"
    )


def main() -> None:
    """Prints one row for each context and budget."""
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
    given = parser.parse_args()
    try:
        measure(given)
    except SpecbuildError as error:
        parser.error(str(error))


def measure(given: argparse.Namespace) -> None:
    """A row for each context and budget; the file has what there is after each."""
    check_asked(read_manifest(given.engine), given)
    chosen = {context: prompts(given.ids, context, given.prompts) for context in given.contexts}
    engine = Engine.load(given.engine, RuntimeSettings(threads=given.threads))
    limits = engine.manifest.limits
    shape = None
    if engine.manifest.draft is not None:
        shape = DraftShape(limits.draft_top_k, limits.draft_depth, limits.draft_tokens)
    print("context blocks  prompts        agreement   checked  tokens a step     tokens/s")
    rows = []
    for context in given.contexts:
        for budget in given.budgets:
            asked = Asked(context, budget)
            runs = decode(
                engine,
                chosen[context],
                asked,
                batch=given.batch,
                tokens=given.tokens,
                speculation=shape,
            )
            rows.append(summary(asked, list(runs)))
            print(line(rows[-1]), flush=True)
            if given.output is not None:
                given.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
