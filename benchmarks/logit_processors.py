"""Measures the cost of logit processors in drafted steps: one JSON line.

Every field is measured against the same prompts without it, both with the same draft chain, in
direct succession. Rates are tokens per second after the first token of each output. The prompts of
a synthetic engine (``ENGINE.prompts.jsonl``) keep the acceptance of its draft:

    specbuild synth --geometry gpt-oss-20b --draft --engine e20 --backend cuda
    python benchmarks/logit_processors.py e20 --prompts e20.prompts.jsonl --batch 1 --batch 16
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

_EXAMPLES = """examples:
  python benchmarks/logit_processors.py engine
  python benchmarks/logit_processors.py engine --prompts engine.prompts.jsonl --batch 16 --depth 3
"""
# A penalty of the prompt's tokens and small others, so that outputs remain as likely.
_FIELDS: dict[str, dict[str, object]] = {
    "top_p": {"temperature": 0.5, "top_p": 0.9},
    "logit_bias": {"logit_bias": {11: 0.5}},
    "penalties": {"presence_penalty": 0.1, "frequency_penalty": 0.05, "repetition_penalty": 1.02},
}
Rate = Callable[[], tuple[float, float]]


def main() -> None:
    """Measure alternately, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--prompts", type=Path, help="JSON lines with prompt_ids (random tokens)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a random prompt (512)")
    parser.add_argument("--tokens", type=int, default=128, help="of an output (128)")
    parser.add_argument("--batch", type=int, action="append", help="concurrent prompts (1 and 16)")
    parser.add_argument("--depth", type=int, default=3, help="of the draft chain; 0 for none (3)")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of a measurement (5)")
    options = parser.parse_args()
    print(json.dumps(_measured(Engine.load(options.engine), options)))


def _measured(engine: Engine, options: argparse.Namespace) -> dict[str, object]:
    batches = options.batch or [1, 16]
    shape = DraftShape(1, options.depth, options.depth) if options.depth else None
    greedy = GenerateParams(options.tokens, ignore_eos=True, detokenize=False)
    fields = {
        name: replace(greedy, sampling=SamplingParams(seed=1, **values))  # type: ignore[arg-type]
        for name, values in _FIELDS.items()
    }
    fields["top_logprobs"] = replace(greedy, top_logprobs=5)
    result = {}
    for batch in batches:
        prompts = _prompts(engine, options, batch)

        def rate(
            params: GenerateParams, others: GenerateParams, prompts: list[Prompt] = prompts
        ) -> Rate:
            each = [params, *[others] * (len(prompts) - 1)]
            return lambda: _rate(engine, prompts, each, shape)

        ratios = {}
        for name, params in fields.items():
            plain = replace(greedy, sampling=SamplingParams(params.sampling.temperature, seed=1))
            ratios[name] = _ratio(options.rounds, rate(plain, plain), rate(params, params))
        if batch > 1:
            one = fields["penalties"]
            ratios["penalties of one"] = _ratio(
                options.rounds, rate(greedy, greedy), rate(one, greedy)
            )
        result[f"batch {batch}"] = ratios
        print(json.dumps({f"batch {batch}": ratios}), flush=True)
    return {
        "engine": options.engine.name,
        "vocabulary": engine.manifest.target.vocab,
        "tokens": options.tokens,
        "depth": options.depth,
        "with_over_without": result,
    }


def _prompts(engine: Engine, options: argparse.Namespace, count: int) -> list[Prompt]:
    if options.prompts is not None:
        lines = options.prompts.read_text(encoding="utf-8").splitlines()[:count]
        if len(lines) < count:
            raise SystemExit(f"{options.prompts} has {len(lines)} prompts, --batch takes {count}")
        return [Prompt(str(i), tuple(json.loads(x)["prompt_ids"])) for i, x in enumerate(lines)]
    random, vocab = np.random.default_rng(1), engine.manifest.target.vocab
    return [
        Prompt(str(i), tuple(random.integers(0, vocab, options.prompt).tolist()))
        for i in range(count)
    ]


def _ratio(rounds: int, base: Rate, other: Rate) -> dict[str, float]:
    """Return rates and tokens per step of both, and the median ratio; the first pair warms up."""
    pairs = [(base(), other()) for _ in range(rounds + 1)][1:]
    return {
        "without_per_s": round(median(a for (a, _), _ in pairs), 1),
        "with_per_s": round(median(b for _, (b, _) in pairs), 1),
        "ratio": round(median(b / a for (a, _), (b, _) in pairs), 4),
        "without_tokens_per_step": round(pairs[0][0][1], 3),
        "with_tokens_per_step": round(pairs[0][1][1], 3),
    }


def _rate(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: Sequence[GenerateParams],
    shape: DraftShape | None,
) -> tuple[float, float]:
    """Return the tokens per second of all sequences, and tokens per step."""
    events = engine.generate(prompts, params, speculation=shape)
    records = [e.record for e in events if isinstance(e, FinishEvent)]
    tokens = sum(len(record.output_ids) - 1 for record in records)
    steps = sum(record.stats.steps for record in records)
    return sum(1 / r.stats.tpot_s for r in records if r.stats.tpot_s), tokens / steps


if __name__ == "__main__":
    main()
