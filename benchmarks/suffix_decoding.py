"""What suffix decoding gains on text that repeats itself: one JSON record.

Prompts are taken in order, each as it is and then twice in a row, and decoded plainly. Those count
of whose output a large share repeats the context: tokens in spans of SPAN or more that stood
before, in the prompt or in the output. They are decoded with each drafter in turn; ratios are of
one round of a prompt, medians over all rounds. Build the engine with --suffix-cached-tokens 0, so
that a prompt's own text is all that is searched.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median

from specbuild.runtime.engine import Engine
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

SPAN = 8
_EXAMPLES = """examples:
  python benchmarks/suffix_decoding.py engine --prompts examples/tiny-gpt-oss/prompts.jsonl
  python benchmarks/suffix_decoding.py engine --prompts p.jsonl --drafters eagle3 suffix auto
"""


@dataclass(frozen=True)
class _Decoded:
    record: RunRecord
    wall_s: float
    cpu_s: float


def repeated_share(context: Sequence[int], output: Sequence[int]) -> float:
    """The share of ``output`` that lies in spans of ``SPAN`` tokens that stood before."""
    text, seen = [*context, *output], set()
    repeats = [False] * len(text)
    for end in range(SPAN, len(text) + 1):
        span = tuple(text[end - SPAN : end])
        if span in seen:
            repeats[end - SPAN : end] = [True] * SPAN
        seen.add(span)
    return sum(repeats[len(context) :]) / len(output)


def main() -> None:
    """Chooses the prompts, measures them in turns, and prints what was found."""
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
    asked = parser.parse_args()
    engine = Engine.load(asked.engine)
    chosen = _chosen(engine, asked)
    drafters = ["none", *asked.drafters]
    for name in drafters:  # measures costs, and reads every graph once
        _decoded(engine, chosen[0][0], asked.tokens, name)
    rounds = [
        {name: _decoded(engine, prompt, asked.tokens, name) for name in _turned(drafters, turn + i)}
        for turn in range(asked.rounds)
        for i, (prompt, _) in enumerate(chosen)
    ]
    print(json.dumps(_report(engine, rounds, [share for _, share in chosen], asked), indent=1))


def _turned(names: Sequence[str], turn: int) -> list[str]:
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def _chosen(engine: Engine, asked: argparse.Namespace) -> list[tuple[Prompt, float]]:
    texts = [json.loads(line) for line in asked.prompts.read_text(encoding="utf-8").splitlines()]
    candidates = [Prompt(t["id"], prompt=t["prompt"]) for t in texts]
    candidates += [
        Prompt(f"{t['id']}, twice", prompt=f"{t['prompt']}\n\n\n{t['prompt']}") for t in texts
    ]
    found: list[tuple[Prompt, float]] = []
    for prompt in candidates:
        record = _decoded(engine, prompt, asked.tokens, "none").record
        share = repeated_share(record.prompt_ids, record.output_ids)
        if share >= asked.share:
            found.append((prompt, share))
        if len(found) == asked.count:
            return found
    raise SystemExit(f"only {len(found)} of {len(candidates)} prompts repeat so much")


def _decoded(engine: Engine, prompt: Prompt, tokens: int, drafter: str) -> _Decoded:
    """One prompt greedily, alone; its clocks run from its first token to its last."""
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


def _machine() -> str:
    """The processor, its cores, and how many processes wanted them in the last minute."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}"


def _report(
    engine: Engine,
    rounds: Sequence[dict[str, _Decoded]],
    shares: Sequence[float],
    asked: argparse.Namespace,
) -> dict[str, object]:
    def ratios(name: str, base: str, clock: str) -> list[float]:
        return [getattr(r[base], clock) / getattr(r[name], clock) for r in rounds]

    best = max(
        (name for name in asked.drafters if name != "auto"),
        key=lambda name: median(ratios(name, "none", "cpu_s")),
    )
    found: dict[str, object] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": _machine(),
        "command": f"benchmarks/suffix_decoding.py {asked.engine.name} --tokens {asked.tokens} "
        f"--rounds {asked.rounds} --drafters {' '.join(asked.drafters)}",
        "versions": {name: version(name) for name in ("specbuild", "onnxruntime", "numpy")},
        "prompts": len(shares),
        "repeated_share": {"least": min(shares), "median": median(shares)},
        "same_output": all(
            r[name].record.output_ids == r["none"].record.output_ids
            for r in rounds
            for name in asked.drafters
        ),
    }
    for name in asked.drafters:
        found[name] = {
            "tokens_a_step": median(r[name].record.stats.mean_acceptance_length for r in rounds),
            "ratio": median(ratios(name, "none", "wall_s")),
            "cpu_ratio": median(ratios(name, "none", "cpu_s")),
        }
    if "auto" in asked.drafters and len(asked.drafters) > 1:
        found["auto_over_better"] = {
            "better": best,
            "ratio": median(ratios("auto", best, "wall_s")),
            "cpu_ratio": median(ratios("auto", best, "cpu_s")),
        }
    found["choice"] = engine.default_draft.reason
    return found


if __name__ == "__main__":
    main()
