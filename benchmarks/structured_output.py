"""Measures the cost of a JSON schema: one JSON line for each.

The same prompts run with and without a schema, in direct succession, with drafts. The result is
decoded tokens per wall and CPU second, from the first token of an output to its last. One schema
forces half of an output; the other has two long texts and forces few tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

_EXAMPLES = """examples:
  python benchmarks/structured_output.py engine --prompts examples/tiny-gpt-oss/prompts.jsonl
  python benchmarks/structured_output.py engine --prompts texts.jsonl --schema s.json --depth 3
"""
_TEXT = {"type": "string", "maxLength": 60}
_FUNCTION = {
    "type": "object",
    "properties": {
        "function_name": {"type": "string", "maxLength": 24},
        "arguments": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "description": _TEXT,
        "returns": {"enum": ["bool", "int", "str", "list", "None"]},
        "example_call": _TEXT,
        "line_number": {"type": "integer", "minimum": 1, "maximum": 9999},
        "is_public": {"type": "boolean"},
    },
    "additionalProperties": False,
}
_FUNCTION["required"] = [*_FUNCTION["properties"]]  # type: ignore[misc]
_TEXTS = {
    "type": "object",
    "properties": {n: {**_TEXT, "minLength": 100, "maxLength": 150} for n in ("code", "text")},
    "required": ["code", "text"],
    "additionalProperties": False,
}
SCHEMAS = {"function": _FUNCTION, "texts": _TEXTS}


@dataclass(frozen=True)
class _Outputs:
    """A round of prompts: records, and seconds after each first token."""

    records: list[RunRecord]
    wall_s: float
    cpu_s: float

    @property
    def per_sequence(self) -> float:
        """The mean rate of a sequence between its first token and its last."""
        return sum(1 / r.stats.tpot_s for r in self.records if r.stats.tpot_s) / len(self.records)

    def per_s(self, seconds: float) -> float:
        return sum(len(record.output_ids) - 1 for record in self.records) / seconds


def main() -> None:
    """Measure alternately, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="texts, as for specbuild run")
    parser.add_argument("--count", type=int, default=8, help="of the prompts (8)")
    parser.add_argument("--schema", type=Path, help="JSON Schema; else a function's, and texts'")
    parser.add_argument("--tokens", type=int, default=96, help="of an output without it (96)")
    parser.add_argument("--rounds", type=int, default=5, help="of all prompts, in pairs (5)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    parser.add_argument("--depth", type=int, help="of every draft, 0 for none; else what pays")
    parser.add_argument(
        "--undrafted", action="store_true", help="decode without a draft where there is no schema"
    )
    parser.add_argument("--together", type=int, default=1, help="prompts at once (1)")
    args = parser.parse_args()
    lines = args.prompts.read_text(encoding="utf-8").splitlines()[: args.count]
    prompts = [Prompt(str(i), prompt=json.loads(line)["prompt"]) for i, line in enumerate(lines)]
    schemas: dict[str, object] = {**SCHEMAS}
    if args.schema is not None:
        schemas = {args.schema.stem: json.loads(args.schema.read_text())}
    engine = Engine.load(args.engine)
    for name, schema in schemas.items():
        guide = Guide.json(json.dumps(schema))
        result = _measured(engine, prompts, guide, args)
        print(json.dumps({"engine": args.engine.name, "schema": name, **result}), flush=True)


def _measured(
    engine: Engine, prompts: Sequence[Prompt], guide: Guide, args: argparse.Namespace
) -> dict[str, object]:
    sampling = SamplingParams(args.temperature, seed=1)
    plain = GenerateParams(args.tokens, sampling, ignore_eos=True)
    guided = GenerateParams(4 * args.tokens, sampling, guide=guide)
    pairs = []
    for number in range(args.rounds + 1):
        pair = [_decoded(engine, prompts, params, args) for params in (plain, guided)]
        if number:  # The first pair measures the draft's costs, and compiles the schema.
            pairs.append(pair)
    outputs = pairs[-1][1].records
    tokens = sum(len(record.output_ids) for record in outputs)
    return {
        "prompts": len(prompts),
        "together": args.together,
        "temperature": args.temperature,
        "depth": args.depth,
        "undrafted_without_schema": args.undrafted,
        "valid": sum(_is_json(record) for record in outputs),
        "output_tokens": tokens,
        "masked_tokens": sum(record.stats.masked_tokens or 0 for record in outputs),
        "steps": sum(record.stats.steps for record in outputs),
        "acceptance_length": [
            sum(len(record.output_ids) - 1 for record in side.records)
            / sum(record.stats.steps for record in side.records)
            for side in pairs[-1]
        ],
        "tokens_per_s": [
            median(side.per_s(side.wall_s) for side in each) for each in zip(*pairs, strict=True)
        ],
        # Outputs of a schema have other lengths, so a group's last ones run alone.
        "ratio_per_sequence": median(b.per_sequence / a.per_sequence for a, b in pairs),
        "ratio": median(b.per_s(b.wall_s) / a.per_s(a.wall_s) for a, b in pairs),
        "cpu_ratio": median(b.per_s(b.cpu_s) / a.per_s(a.cpu_s) for a, b in pairs),
    }


def _is_json(record: RunRecord) -> bool:
    if record.finish_reason == "length" or record.text is None:
        return False
    json.loads(record.text)
    return True


def _decoded(
    engine: Engine, prompts: Sequence[Prompt], params: GenerateParams, args: argparse.Namespace
) -> _Outputs:
    """Run the prompts in groups; a group's clocks run from its first step to its last."""
    shape: str | DraftShape | None = "default"
    if args.depth == 0 or (args.undrafted and params.guide is None):
        shape = None
    elif args.depth is not None:
        shape = DraftShape(1, args.depth, args.depth)
    records, wall_s, cpu_s = [], 0.0, 0.0
    for start in range(0, len(prompts), args.together):
        group = prompts[start : start + args.together]
        began: set[int] = set()
        started = (0.0, 0.0)
        for event in engine.generate(group, replace(params), speculation=shape):
            if isinstance(event, FinishEvent):
                records.append(event.record)
            elif len(began) < len(group):
                began.add(event.request)
                started = (time.perf_counter(), time.process_time())
        wall_s += time.perf_counter() - started[0]
        cpu_s += time.process_time() - started[1]
    return _Outputs(records, wall_s, cpu_s)


if __name__ == "__main__":
    main()
