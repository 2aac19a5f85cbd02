"""Decoding speed of a synthetic engine by batch and draft, as one JSON line.

It is for alternating runs with two installed versions, each with its own engine: prompts and
numbers of tokens are equal, and the output has a digest of the tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.settings import PrefillSchedule, RuntimeSettings

_EXAMPLES = """examples:
  specbuild synth --geometry gpt-oss-20b --draft --unique-layers 2 --engine e --backend cuda \\
    --max-batch-size 16
  python benchmarks/decode_speed.py e --batch 1 --batch 16 --depth 3
"""


def main() -> None:
    """Time every batch, without a draft and, if the engine has one, with it."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path, help="engine with ENGINE.prompts.jsonl beside it")
    parser.add_argument("--batch", type=int, action="append", help="sequences (1, 4 and 16)")
    parser.add_argument("--depth", type=int, default=3, help="depth of the drafted chain (3)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each sequence (256)")
    parser.add_argument("--rounds", type=int, default=3, help="runs, of which the best counts (3)")
    args = parser.parse_args()
    started_s = time.perf_counter()
    settings = RuntimeSettings(prefill=PrefillSchedule(steps_between=0))
    engine = Engine.load(args.engine, settings)
    result: dict[str, object] = {"load_s": round(time.perf_counter() - started_s, 2)}
    lines = Path(f"{args.engine}.prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [tuple(json.loads(line)["prompt_ids"]) for line in lines]
    shapes: dict[str, DraftShape | None] = {"none": None}
    if engine.manifest.draft is not None:
        shapes[f"chain of {args.depth}"] = DraftShape(1, args.depth, args.depth)
    for batch in args.batch or (1, 4, 16):
        inputs = [Prompt(str(i), prompts[i % len(prompts)]) for i in range(batch)]
        for name, shape in shapes.items():
            run(engine, inputs, 16, shape)
            runs = [run(engine, inputs, args.tokens, shape) for _ in range(args.rounds)]
            result[f"batch {batch}, {name}"] = min(runs, key=lambda figures: figures["tpot_us"])
    print(json.dumps(result))


def run(engine: Engine, prompts: list[Prompt], tokens: int, shape: DraftShape | None) -> dict:
    """Return one run: median time between tokens, the last TTFT, tokens per step, a digest."""
    params = GenerateParams(max_new_tokens=tokens, ignore_eos=True)
    records: dict[int, RunRecord] = {}
    for event in engine.generate(prompts, params, speculation=shape):
        if isinstance(event, FinishEvent):
            records[event.request] = event.record
    stats = [record.stats for record in records.values()]
    tpot_s = sorted(s.tpot_s for s in stats if s.tpot_s is not None)
    output = str([records[i].output_ids for i in range(len(prompts))])
    return {
        "tpot_us": round(1e6 * tpot_s[len(tpot_s) // 2], 2),
        "ttft_ms": round(1e3 * max(s.ttft_s for s in stats), 2),
        "tokens_a_step": round(sum(s.mean_acceptance_length for s in stats) / len(stats), 3),
        "digest": hashlib.sha256(output.encode()).hexdigest()[:12],
    }


if __name__ == "__main__":
    main()
