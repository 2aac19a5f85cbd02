"""What fields that change logits cost on an engine for CUDA: one JSON line.

Rates are tokens by second behind an output's first one. A field's is held against the same prompt
without it and without a draft; that of neighbours, who draft, against theirs when they are alone.
Every pair is measured one after the other, in turns.
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
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

_EXAMPLES = """examples:
  python benchmarks/adjusted_steps.py engine
  python benchmarks/adjusted_steps.py engine --prompt 2048 --tokens 256 --neighbours 7
"""
_FIELDS: dict[str, dict[str, object]] = {
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "logit_bias": {"logit_bias": {11: 1.0}},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
}


def main() -> None:
    """Measures in turns, and prints what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (512)")
    parser.add_argument("--tokens", type=int, default=128, help="of an output (128)")
    parser.add_argument("--neighbours", type=int, default=3, help="that draft beside one (3)")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of a measurement (5)")
    asked = parser.parse_args()
    print(json.dumps(_measured(Engine.load(asked.engine), asked)))


def _measured(engine: Engine, asked: argparse.Namespace) -> dict[str, object]:
    random, vocab = np.random.default_rng(1), engine.manifest.target.vocab
    prompts = [
        Prompt(str(i), tuple(random.integers(0, vocab, asked.prompt).tolist()))
        for i in range(1 + asked.neighbours)
    ]
    greedy = GenerateParams(asked.tokens, ignore_eos=True, detokenize=False)
    fields = {
        name: replace(greedy, sampling=SamplingParams(seed=1, **values))  # type: ignore[arg-type]
        for name, values in _FIELDS.items()
    }
    fields["top_logprobs"] = replace(greedy, top_logprobs=20)
    if engine.text is not None:
        fields["guide"] = replace(greedy, guide=Guide.regex("[a-z ]{2000}"), detokenize=True)

    def alone(params: GenerateParams) -> Callable[[], float]:
        plain = SamplingParams(params.sampling.temperature, seed=1)
        return lambda: _rate(engine, prompts[:1], [replace(greedy, sampling=plain)], drafts=False)

    found = {
        name: _ratio(
            asked.rounds,
            alone(params),
            lambda params=params: _rate(engine, prompts[:1], [params], drafts=False),  # type: ignore[misc]
        )
        for name, params in fields.items()
    }
    others, many = prompts[1:], [greedy] * asked.neighbours
    beside = [fields["penalties"], *many]
    return {
        "engine": asked.engine.name,
        "vocabulary": vocab,
        "prompt": asked.prompt,
        "tokens": asked.tokens,
        "over_plain_steps": found,
        "neighbours": asked.neighbours,
        "beside_one_over_alone": _ratio(
            asked.rounds,
            lambda: _rate(engine, others, many, drafts=True),
            lambda: _rate(engine, prompts, beside, drafts=True, first=1),
        ),
    }


def _ratio(rounds: int, base: Callable[[], float], other: Callable[[], float]) -> dict[str, float]:
    """Rates of both, and the median of their ratios; a first pair warms up."""
    pairs = [(base(), other()) for _ in range(rounds + 1)][1:]
    return {
        "base_per_s": median(a for a, _ in pairs),
        "per_s": median(b for _, b in pairs),
        "ratio": median(b / a for a, b in pairs),
    }


def _rate(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: Sequence[GenerateParams],
    *,
    drafts: bool,
    first: int = 0,
) -> float:
    """Tokens a second of the sequences from number ``first`` on, added up."""
    events = engine.generate(prompts, params, speculation="default" if drafts else None)
    records = {e.request: e.record for e in events if isinstance(e, FinishEvent)}
    spans = [records[i].stats.tpot_s for i in range(first, len(prompts))]
    return sum(1 / span for span in spans if span)


if __name__ == "__main__":
    main()
