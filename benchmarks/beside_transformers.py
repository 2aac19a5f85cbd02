"""Compares small models on a CPU with transformers' ``generate``, in tokens per CPU second.

    .venv/bin/python benchmarks/beside_transformers.py --output benchmarks/results/FILE.json

Checkpoints have ``synth``'s tiny geometries: fp32, one sequence, greedy, one thread each, no draft.
Both decode alternately. Ratios are of CPU time, which other work on the machine affects least, and
also of wall time. Both must decode the same tokens, or the script fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.options import SynthOptions
from specbuild.builder.synth.synth import TARGET_FOLDER, write_checkpoints
from specbuild.runtime.device import this_device
from specbuild.runtime.engine import Engine
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

GEOMETRIES = ("tiny-llama", "tiny-qwen3", "tiny-qwen3-moe", "tiny-mla")
PROMPT_TOKENS = 32
PACKAGES = ("onnxruntime", "numpy", "torch", "transformers")


def timed(work: Callable[[list[int]], list[int]], ids: list[int]) -> tuple[float, float, list[int]]:
    """Return CPU seconds, wall seconds, and the tokens that follow ``ids``."""
    processor_s, clock_s = time.process_time(), time.perf_counter()
    tokens = work(ids)
    return time.process_time() - processor_s, time.perf_counter() - clock_s, tokens


def compared(folder: Path, geometry: str, pairs: int, new_tokens: int) -> dict[str, Any]:
    """Return the ratios of one geometry."""
    from transformers import AutoModelForCausalLM

    model = SynthModel(SynthOptions(geometry, prompts=pairs + 1, prompt_tokens=PROMPT_TOKENS))
    write_checkpoints(model, folder / geometry, SilentProgress(), force=False)
    target = folder / geometry / TARGET_FOLDER
    options = BuildOptions.from_flat(
        model=target, output=folder / f"{geometry}.engine", max_seq_len=1024, max_batch_size=1
    )
    build(options, SilentProgress())
    engine = Engine.load(options.output)
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    params = GenerateParams(max_new_tokens=new_tokens, ignore_eos=True)

    def ours(ids: list[int]) -> list[int]:
        events = engine.generate([Prompt("0", prompt_ids=tuple(ids))], params, speculation=None)
        return next([*e.record.output_ids] for e in events if isinstance(e, FinishEvent))

    def generated(ids: list[int]) -> list[int]:
        inputs = torch.tensor([ids])
        created = theirs.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False,
            min_new_tokens=new_tokens, max_new_tokens=new_tokens,
        )  # fmt: skip
        return [*created[0, len(ids) :].tolist()]

    runs = []
    for number, ids in enumerate(model.prompts()):
        first, second = (ours, generated) if number % 2 else (generated, ours)
        result = {work: timed(work, ids) for work in (first, second)}
        if result[ours][2] != result[generated][2]:
            raise SystemExit(f"{geometry}: the tokens differ")
        if number:  # The first pair loads what is loaded lazily.
            runs.append((result[ours][:2], result[generated][:2]))
    ratios = [[other[i] / own[i] for own, other in runs] for i in (0, 1)]
    return {
        "times_faster_by_processor_time": round(statistics.median(ratios[0]), 2),
        "least": round(min(ratios[0]), 2),
        "times_faster_by_clock": round(statistics.median(ratios[1]), 2),
        "tokens_per_processor_s": round(new_tokens / statistics.median(r[0][0] for r in runs), 1),
        "transformers_tokens_per_processor_s": round(
            new_tokens / statistics.median(r[1][0] for r in runs), 1
        ),
        "pairs": len(runs),
    }


def main() -> None:
    """Print the figures, and write them with the machine and the versions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--geometries", nargs="+", default=GEOMETRIES)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--date", help="recorded as given")
    args = parser.parse_args()
    torch.set_num_threads(1)
    here = this_device()
    with tempfile.TemporaryDirectory() as folder:
        figures = {
            name: compared(Path(folder), name, args.pairs, args.new_tokens)
            for name in args.geometries
        }
    text = json.dumps({
        "command": "python benchmarks/beside_transformers.py",
        "date": args.date,
        "processor": here.cpu_name,
        "cores": here.cores,
        "threads": 1,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": args.new_tokens,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "figures": figures,
    }, indent=1)  # fmt: skip
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
