"""Measures chains of each length on an engine of ``specbuild synth``, one sequence at a time.

    python benchmarks/draft_chains.py ENGINE [--tokens 384] [--prompts 3] [--repeats 3]

The last repeat is printed: tokens per second after the first token, tokens per step, the time of a
step, whether the tokens equal those without a draft, and accepted draft tokens: steps.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from specbuild import Engine, GenerateParams
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, Prompt

CHAINS = (1, 2, 3, 4, 7)


def main() -> None:
    """Measure the engine that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    written = Path(f"{args.engine}.prompts.jsonl").read_text(encoding="utf-8").splitlines()
    lines = [json.loads(line) for line in written[: args.prompts]]
    prompts = [Prompt(id=line["id"], prompt_ids=tuple(line["prompt_ids"])) for line in lines]
    engine = Engine.load(args.engine)
    deepest = engine.manifest.limits.draft_depth
    shapes = [None, *[DraftShape(1, depth, depth) for depth in CHAINS if depth <= deepest]]
    params = GenerateParams(max_new_tokens=args.tokens, ignore_eos=True)
    plain: list[tuple[int, ...]] = []
    for repeat in range(args.repeats):
        for shape in shapes:
            records = [_record(engine, prompt, params, shape) for prompt in prompts]
            outputs = [tuple(record.output_ids) for record in records]
            plain = plain or outputs
            if repeat == args.repeats - 1:
                print(_line(records, shape, same=outputs == plain), flush=True)


def _record(
    engine: Engine, prompt: Prompt, params: GenerateParams, shape: DraftShape | None
) -> RunRecord:
    events = engine.generate([prompt], params, speculation=shape)
    (record,) = [event.record for event in events if isinstance(event, FinishEvent)]
    return record


def _line(records: list[RunRecord], shape: DraftShape | None, *, same: bool) -> str:
    emitted = sum(len(record.output_ids) - 1 for record in records)
    steps = sum(record.stats.steps for record in records)
    seconds = sum((r.stats.tpot_s or 0) * (len(r.output_ids) - 1) for r in records)
    accepted: Counter[int] = Counter()
    for record in records:
        accepted.update(dict(enumerate(record.stats.acceptance_histogram)))
    name = "none" if shape is None else f"chain {shape.draft_depth}"
    return (
        f"{name:8} {emitted / seconds:8.1f} tok/s  {emitted / steps:5.2f} tokens a step  "
        f"{seconds / steps * 1e6:7.0f} us a step  same {same}  {[*accepted.values()]}"
    )


if __name__ == "__main__":
    main()
