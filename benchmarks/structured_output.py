"""Measures the cost of a JSON schema: one JSON line for each.

The same prompts run with and without a schema, in direct succession, with drafts. The result is
decoded tokens per wall and CPU second, from the first token of an output to its last. One schema
forces half of an output; the other has two long texts and forces few tokens.

A last pair of rounds is not part of the rates. On CUDA engines it states where the time of the
decoding thread goes, without and with the schema: the wait for the device, the calls that queue its
work, and the guide. It also counts launches by program, and the steps of a sequence whose tokens
were discarded or masked.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from specbuild.runtime.decode.device import stepper as device_stepper
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.executor import DeviceExecutor
from specbuild.runtime.guides.grammar import GuideState
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


class _Anatomy:
    """Seconds of the decoding thread by part, and counts of calls, of a round."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.programs: Counter[str] = Counter()
        self._is_timed = False

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed where it is not called by another timed one."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_timed:
                return function(*args, **kwargs)
            self._is_timed, started_s = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._is_timed = False
                self.seconds[part] += time.perf_counter() - started_s
                self.counts[part] += 1

        return call

    @contextmanager
    def observing(self, executor: DeviceExecutor) -> Iterator[None]:
        """Time the calls of the executor and of guides."""
        count_discarded, start = device_stepper.count_discarded, executor.start

        def discarded(*args: Any) -> None:
            self.counts["discarded"] += 1
            count_discarded(*args)

        def started(entry: Any, step: int | None = None) -> None:
            self.programs[entry.name] += 1
            start(entry, step)

        queue = {name: getattr(executor, name) for name in ("write", "fill", "copy", "fetch")}
        guide = ("mask", "check", "allows", "forced", "complete")
        with ExitStack() as patches:
            patches.enter_context(patch.object(device_stepper, "count_discarded", discarded))
            for part, name, function in (
                ("wait", "wait_step", executor.wait_step),
                ("launch", "start", started),
                *(("queue", name, function) for name, function in queue.items()),
            ):
                patches.enter_context(patch.object(executor, name, self.timed(part, function)))
            for name in guide:
                function = self.timed(f"guide.{name}", getattr(GuideState, name))
                patches.enter_context(patch.object(GuideState, name, function))
            yield

    def result(self, outputs: _Outputs) -> dict[str, object]:
        """Return the parts, in microseconds and calls per step of the device."""
        steps = self.counts["wait"]
        return {
            "device_steps": steps,
            "us_per_step": round(1e6 * outputs.wall_s / steps, 1),
            "parts_us_per_step": {
                name: round(1e6 * seconds / steps, 1)
                for name, seconds in sorted(self.seconds.items())
            },
            "calls_per_step": {
                name: round(self.counts[name] / steps, 2) for name in sorted(self.seconds)
            },
            "discarded_steps": self.counts["discarded"],
            "masks": self.counts["guide.mask"],
            "programs": dict(self.programs.most_common()),
        }


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
    anatomies = []
    if isinstance(engine.executor, DeviceExecutor):
        for params in (plain, guided):
            anatomy = _Anatomy()
            with anatomy.observing(engine.executor):
                observed = _decoded(engine, prompts, params, args)
            anatomies.append(anatomy.result(observed))
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
        "cpu_us_per_token": [
            round(median(1e6 / side.per_s(side.cpu_s) for side in each), 1)
            for each in zip(*pairs, strict=True)
        ],
        "anatomy": anatomies,
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
