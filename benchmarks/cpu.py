"""The CPU figures of the example model: the draft's gain, transformers, and start-up.

Everything is measured with one thread each, and compared programs alternate. ``--only`` measures
one figure and keeps the others of the output file:

    .venv/bin/python benchmarks/cpu.py --output benchmarks/results/cpu.json
    .venv/bin/python benchmarks/cpu.py --only greedy_default --output benchmarks/results/cpu.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.device import this_device
from specbuild.runtime.engine import Engine, Speculation
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.settings import RuntimeSettings

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny-gpt-oss"
PACKAGES = ("specbuild", "onnxruntime", "numpy", "torch", "transformers", "tokenizers")
CHAIN = DraftShape(draft_top_k=1, draft_depth=3, draft_tokens=3)
TEMPERATURES = (0.7, 0.8, 1.0)
NOTHING = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def read_prompts() -> list[Prompt]:
    """The example's held-out prompts."""
    lines = (EXAMPLE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [Prompt(r["id"], None, r["prompt"]) for r in map(json.loads, lines)]


def decode(
    engine: Engine, prompt: Prompt, params: GenerateParams, how: Speculation
) -> tuple[float, RunRecord]:
    """Return seconds and result of one prompt."""
    started_s = perf_counter()
    events = engine.generate([prompt], params, speculation=how)
    record = next(e.record for e in events if isinstance(e, FinishEvent))
    return perf_counter() - started_s, record


def draft_gain(engine: Engine, params: GenerateParams, how: Speculation) -> dict[str, Any]:
    """Compare decoding with and without a draft, prompt by prompt, in alternating order."""
    ratios, plain_rate, draft_rate, steps, tokens, differ = [], [], [], 0, 0, 0
    for i, prompt in enumerate(read_prompts()):
        order: list[Speculation] = [None, how] if i % 2 else [how, None]
        runs = {mode is None: decode(engine, prompt, params, mode) for mode in order}
        (plain_s, plain), (draft_s, drafted) = runs[True], runs[False]
        ratios.append(plain_s / draft_s)
        plain_rate.append(plain.stats.output_tokens_per_s)
        draft_rate.append(drafted.stats.output_tokens_per_s)
        steps += drafted.stats.steps
        tokens += drafted.stats.output_tokens - 1
        differ += plain.output_ids != drafted.output_ids
    return {
        "pairs": len(ratios),
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "plain_tokens_per_s": statistics.median(plain_rate),
        "draft_tokens_per_s": statistics.median(draft_rate),
        "mean_acceptance_length": tokens / steps,
        "outputs_that_differ": differ,
    }


def against_transformers(engine: Engine, prompts: int, tokens: int) -> dict[str, float]:
    """Return specbuild's tokens per second divided by transformers'; greedy, cached, fp32."""
    from transformers import GptOssForCausalLM

    model = GptOssForCausalLM.from_pretrained(EXAMPLE / "target", dtype=torch.float32).float()
    assert engine.text is not None
    params = GenerateParams(max_new_tokens=tokens, ignore_eos=True)
    ratios, theirs_s = [], []
    for prompt in read_prompts()[:prompts]:
        ids = engine.text.encode(prompt.prompt or "", raw=True, most_tokens=1 << 15)
        started_s = perf_counter()
        model.generate(
            torch.tensor([ids]), min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False
        )
        theirs_s.append(perf_counter() - started_s)
        ratios.append(theirs_s[-1] / decode(engine, prompt, params, None)[0])
    return {
        "ratio_median": statistics.median(ratios),
        "transformers_tokens_per_s": tokens / statistics.median(theirs_s),
    }


def in_fresh_processes(measure: Callable[[], float], runs: int = 5) -> float:
    """Return the median seconds of a measurement that starts its own processes."""
    return statistics.median(measure() for _ in range(runs))


def first_token_s(engine: Path) -> float:
    """Return the seconds from the start of ``specbuild run`` to its first byte of output."""
    command = [sys.executable, "-m", "specbuild.cli.main", "run", str(engine), "--prompt", "def f(",
               "--max-new-tokens", "8"]  # fmt: skip
    started_s = perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        return perf_counter() - started_s


def import_s() -> float:
    """Return the seconds of importing the engine inside a fresh interpreter."""
    code = NOTHING.format("import specbuild.runtime.engine")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def sampled(temperature: float) -> GenerateParams:
    """Return the parameters of 256 tokens at a temperature."""
    return GenerateParams(256, sampling=SamplingParams(temperature=temperature, seed=1))


def figures(folder: Path, only: str | None) -> dict[str, Any]:
    """Return all figures, or the one of this name, starting with a build of the example."""
    options = BuildOptions(
        model=EXAMPLE / "target", draft=EXAMPLE / "draft", output=folder / "engine"
    )
    started_s = perf_counter()
    build(options, SilentProgress())
    build_s = perf_counter() - started_s
    engine = Engine.load(options.output, RuntimeSettings(device="cpu"))
    greedy = sampled(0.0)
    decode(engine, read_prompts()[0], greedy, "default")
    measurements: dict[str, Callable[[], Any]] = {
        "build_s": lambda: build_s,
        "greedy_default": lambda: draft_gain(engine, greedy, "default"),
        "greedy_chain_of_3": lambda: draft_gain(engine, greedy, CHAIN),
        **{
            f"sampled_{t}_default": partial(draft_gain, engine, sampled(t), "default")
            for t in TEMPERATURES
        },
        "transformers": lambda: against_transformers(engine, prompts=6, tokens=256),
        "run_to_first_token_s": lambda: in_fresh_processes(lambda: first_token_s(options.output)),
        "import_runtime_s": lambda: in_fresh_processes(import_s),
    }
    return {name: measure() for name, measure in measurements.items() if only in (None, name)}


def main() -> None:
    """Print the figures, and write them with the machine and the versions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--date", default=None, help="recorded as given")
    parser.add_argument("--only", metavar="FIGURE", help="measure this one, keep others of FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    here = this_device()
    earlier: dict[str, Any] = {}
    if args.only is not None and args.output is not None and args.output.is_file():
        earlier = json.loads(args.output.read_text(encoding="utf-8"))["figures"]
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "command": "python benchmarks/cpu.py",
            "date": args.date,
            "processor": here.cpu_name,
            "cores": here.cores,
            "threads": 1,
            "python": platform.python_version(),
            "versions": {name: version(name) for name in PACKAGES},
            "figures": earlier | figures(Path(folder), args.only),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
