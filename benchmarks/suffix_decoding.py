"""Measures suffix decoding on text that repeats itself: one JSON record.

Prompts are used in order, each as it is and then twice in succession, and decoded plainly. A prompt
of token ids, as those of ``specbuild synth``, is followed by its output and itself. The selected
prompts are those whose output repeats a large share of the context: tokens in spans of SPAN or more
that occurred before, in the prompt or in the output. They are decoded with each drafter in turn;
ratios are within one round of a prompt, medians over all rounds. Build the engine with
--suffix-cached-tokens 0, so that only a prompt's own text is searched.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from specbuild.runtime.engine import Engine
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

SPAN = 8
_EXAMPLES = """examples:
  python benchmarks/suffix_decoding.py engine --prompts examples/tiny-gpt-oss/prompts.jsonl
  python benchmarks/suffix_decoding.py engine --prompts p.jsonl --drafters eagle3 suffix auto
  python benchmarks/suffix_decoding.py e --prompts e.prompts.jsonl --drafters eagle3 suffix auto
"""


@dataclass(frozen=True)
class _Decoded:
    record: RunRecord
    wall_s: float
    cpu_s: float


def repeated_share(context: Sequence[int], output: Sequence[int]) -> float:
    """Return the share of ``output`` in spans of ``SPAN`` tokens that occurred before."""
    text, seen = [*context, *output], set()
    repeats = [False] * len(text)
    for end in range(SPAN, len(text) + 1):
        span = tuple(text[end - SPAN : end])
        if span in seen:
            repeats[end - SPAN : end] = [True] * SPAN
        seen.add(span)
    return sum(repeats[len(context) :]) / len(output)


def main() -> None:
    """Select the prompts, measure them alternately, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="texts, as for specbuild run")
    parser.add_argument("--count", type=int, default=20, help="prompts that are measured (20)")
    parser.add_argument("--share", type=float, default=0.8, help="of an output that repeats (0.8)")
    parser.add_argument("--tokens", type=int, default=192, help="of an output (192)")
    parser.add_argument("--rounds", type=int, default=3, help="of each prompt (3)")
    parser.add_argument("--drafters", nargs="+", default=["suffix"], help="beside none (suffix)")
    args = parser.parse_args()
    engine = Engine.load(args.engine)
    chosen = _chosen(engine, args)
    drafters = ["none", *args.drafters]
    for name in drafters:  # Measures costs, and runs every graph once.
        _decoded(engine, chosen[0][0], args.tokens, name)
    rounds = [
        {
            name: _decoded(engine, prompt, args.tokens, name)
            for name in _turned(drafters, round_index + i)
        }
        for round_index in range(args.rounds)
        for i, (prompt, _) in enumerate(chosen)
    ]
    print(json.dumps(_report(engine, rounds, [share for _, share in chosen], args), indent=1))


def _parts(engine: Engine) -> tuple[str, ...]:
    on_gpu = isinstance(engine.executor, CudaExecutor)
    return ("specbuild", "cuda-bindings" if on_gpu else "onnxruntime", "numpy")


def _turned(names: Sequence[str], round_index: int) -> list[str]:
    first = round_index % len(names)
    return [*names[first:], *names[:first]]


def _chosen(engine: Engine, args: argparse.Namespace) -> list[tuple[Prompt, float]]:
    texts = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    result: list[tuple[Prompt, float]] = []
    for prompt in _candidates(engine, texts, args.tokens):
        record = _decoded(engine, prompt, args.tokens, "none").record
        share = repeated_share(record.prompt_ids, record.output_ids)
        if share >= args.share:
            result.append((prompt, share))
        if len(result) == args.count:
            return result
    raise SystemExit(f"only {len(result)} of {2 * len(texts)} prompts repeat so much")


def _candidates(engine: Engine, texts: Sequence[dict[str, Any]], tokens: int) -> Iterator[Prompt]:
    for text in texts:
        ids = tuple(text["prompt_ids"]) if "prompt_ids" in text else None
        yield Prompt(text["id"], ids, text.get("prompt"))
    for text in texts:
        name = f"{text['id']}, twice"
        if "prompt" in text:
            yield Prompt(name, prompt=f"{text['prompt']}\n\n\n{text['prompt']}")
        else:
            ids = tuple(text["prompt_ids"])
            output = _decoded(engine, Prompt(name, ids), tokens, "none").record.output_ids
            yield Prompt(name, (*ids, *output, *ids))


def _decoded(engine: Engine, prompt: Prompt, tokens: int, drafter: str) -> _Decoded:
    """Decode one prompt greedily, alone; its clocks run from its first token to its last."""
    params = GenerateParams(tokens, ignore_eos=True, raw=True)
    started = None
    for event in engine.generate([prompt], params, drafter=drafter):
        if isinstance(event, FinishEvent):
            assert started is not None
            return _Decoded(
                event.record,
                time.perf_counter() - started[0],
                time.process_time() - started[1],
            )
        started = started or (time.perf_counter(), time.process_time())
    raise RuntimeError("the engine ended a request without its record")


def _machine(engine: Engine) -> str:
    """Return the GPU, or the processor, its cores, and the load average of the last minute."""
    if isinstance(engine.executor, CudaExecutor):
        return engine.executor.runner.gpu.facts.name
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}"


def _report(
    engine: Engine,
    rounds: Sequence[dict[str, _Decoded]],
    shares: Sequence[float],
    args: argparse.Namespace,
) -> dict[str, object]:
    def ratios(name: str, base: str, clock: str) -> list[float]:
        return [getattr(r[base], clock) / getattr(r[name], clock) for r in rounds]

    on_gpu = isinstance(engine.executor, CudaExecutor)
    best = max(
        (name for name in args.drafters if name != "auto"),
        key=lambda name: median(ratios(name, "none", "wall_s" if on_gpu else "cpu_s")),
    )
    result: dict[str, object] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": _machine(engine),
        "command": f"benchmarks/suffix_decoding.py {args.engine.name} --tokens {args.tokens} "
        f"--rounds {args.rounds} --drafters {' '.join(args.drafters)}",
        "versions": {name: version(name) for name in _parts(engine)},
        "prompts": len(shares),
        "repeated_share": {"least": min(shares), "median": median(shares)},
        "same_output": all(
            r[name].record.output_ids == r["none"].record.output_ids
            for r in rounds
            for name in args.drafters
        ),
    }
    for name in args.drafters:
        result[name] = {
            "tokens_a_step": median(r[name].record.stats.mean_acceptance_length for r in rounds),
            "ratio": median(ratios(name, "none", "wall_s")),
            "cpu_ratio": median(ratios(name, "none", "cpu_s")),
            "tokens_per_s": median((args.tokens - 1) / r[name].wall_s for r in rounds),
        }
    if "auto" in args.drafters and len(args.drafters) > 1:
        result["auto_over_better"] = {
            "better": best,
            "ratio": median(ratios("auto", best, "wall_s")),
            "cpu_ratio": median(ratios("auto", best, "cpu_s")),
        }
    result["choice"] = engine.default_draft.reason
    return result


if __name__ == "__main__":
    main()
