"""Tokens per step of sampled requests, with and without shared noise in the draft.

Every prompt is decoded without a draft, then with a chain and a tree, each with the draft's most
likely tokens and with its tokens under the target's noise. All outputs must be equal:

    specbuild build --model examples/tiny-gpt-oss/target --draft examples/tiny-gpt-oss/draft \\
      --output engine
    python benchmarks/shared_noise.py engine --temperature 0.8 --temperature 1 --output record.json

Speeds are processor seconds without a draft over those with one, of one process and thread.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

from draft_policy import CHAIN, decode, prompt_sets, timed

from specbuild.runtime.draft.eagle3 import Eagle3Drafter
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams

SHAPES = {"none": None, "chain 1x3x3": CHAIN, "tree 3x3x8": DraftShape(3, 3, 8)}


def measure(engine: Engine, temperature: float, prompts: int, tokens: int) -> dict[str, Any]:
    """Tokens per step and speed of each shape; the number of outputs that differ must be 0."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    pairs = [(shape, noise) for shape in SHAPES for noise in (False, True) if shape != "none"]
    for number, prompt in enumerate(p for some in prompt_sets(prompts).values() for p in some):
        sampling = SamplingParams(temperature=temperature, seed=number)
        params = GenerateParams(max_new_tokens=tokens, sampling=sampling)
        plain = None
        for shape, noise in [("none", True), *pairs]:
            off = patch.object(Eagle3Drafter, "_noise", lambda *_: None)
            if not noise:
                off.start()
            _, cpu_s, record = timed(lambda s=shape: decode(engine, prompt, params, SHAPES[s]))  # noqa: B023
            if not noise:
                off.stop()
            plain = plain or record
            total = totals[f"{shape}{', shared noise' if noise and shape != 'none' else ''}"]
            total[0] += len(record.output_ids) - 1
            total[1] += record.stats.steps
            total[2] += cpu_s
            total[3] += record.output_ids != plain.output_ids
    plain_s = totals["none"][2]
    return {
        name: {
            "tokens_per_step": round(total[0] / total[1], 3),
            "cpu_speed": round(plain_s / total[2], 3),
            "outputs_that_differ": total[3],
        }
        for name, total in totals.items()
    }


def main() -> None:
    """Print the figures, and write them to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path, help="a CPU engine with an EAGLE3 draft")
    parser.add_argument("--temperature", type=float, action="append", help="0.8 and 1 by default")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of each set (8)")
    parser.add_argument("--tokens", type=int, default=160, help="tokens of each prompt (160)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    engine = Engine.load(args.engine)
    figures = {
        str(t): measure(engine, t, args.prompts, args.tokens)
        for t in args.temperature or (0.8, 1.0)
    }
    print(json.dumps(figures, indent=1))
    if args.output is not None:
        args.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
