"""Decodes one sequence with transformers and with an engine, in one process on one GPU.

    specbuild synth --geometry gpt-oss-20b --unique-layers 2 --engine engine \
        --backend cuda --gpu sm_90a --max-seq-len 2048 --max-batch-size 1
    python benchmarks/transformers_decode.py engine [--seconds 170] [--json FILE]

transformers gets random weights of the engine's geometry in bf16 (42 GB for GPT-OSS 20B: it has no
MXFP4 without kernels from its hub) and a static cache. It runs first eagerly, experts in two ways,
then through torch.compile as ``generate`` does it. A token's time is the median between two that
arrive at the host. What has not come through when the time is over is left out, and named.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from specbuild.builder.families.registry import target_family
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.feed_forward import MoeFeedForward
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.request import GenerateParams, Prompt, TokenEvent

CONTEXT, TOKENS = 1000, 64
# ``generate`` turns grouped products into batched ones for the tokens after the prompt.
EXPERTS = ("grouped_mm", "eager")
# Of their configs; the rest says how weights of this geometry are stored.
LEFT_OUT = ("quantization_config", "architectures", "torch_dtype")
INIT_STD = 0.02
MILLISECONDS = 1e3


class Record:
    """The figures so far; ``finish`` may come from a thread while a measurement is stuck."""

    def __init__(self, file: Path | None) -> None:
        self._file, self._lock = file, threading.Lock()
        self.values: dict[str, Any] = {"context": CONTEXT, "tokens": TOKENS, "runs": []}
        self.running = "start"

    def finish(self, *, late: bool) -> None:
        """Prints everything as JSON and ends the process: a compiler cannot be interrupted."""
        with self._lock:
            if late:
                self.values["not_finished"] = self.running
            best = min((run["token_ms"] for run in self.values["runs"]), default=None)
            ours = self.values.get("specbuild", {}).get("token_ms")
            if best is not None and ours is not None:
                self.values["times_faster"] = round(best / ours, 2)
            text = json.dumps(self.values, indent=1)
            print(text, flush=True)
            if self._file is not None:
                self._file.write_text(text + "\n", encoding="utf-8")
            os._exit(0)


def token_ms(arrivals_s: list[float]) -> float:
    """Median milliseconds between two tokens, less the first quarter."""
    steady = np.diff(arrivals_s[len(arrivals_s) // 4 :])
    return round(statistics.median(steady.tolist()) * MILLISECONDS, 4)


def engine_figures(engine: Engine, prompt: list[int]) -> dict[str, float]:
    """A token's time through ``Engine.generate`` without a draft."""
    params = GenerateParams(max_new_tokens=TOKENS * 4, ignore_eos=True)
    for _ in range(2):  # the first loads programs
        events = engine.generate([Prompt("random", tuple(prompt))], params, speculation=None)
        arrivals_s = [time.perf_counter() for event in events if isinstance(event, TokenEvent)]
    # Two steps are in flight, so tokens arrive in pairs now and then: the mean, not the median.
    steady = arrivals_s[len(arrivals_s) // 4 :]
    each_ms = (steady[-1] - steady[0]) / (len(steady) - 1) * MILLISECONDS
    return {"token_ms": round(each_ms, 4), "tokens_per_s": round(MILLISECONDS / each_ms, 1)}


def random_model(geometry: TargetGeometry, device: str) -> PreTrainedModel:
    """transformers' model of this geometry, bf16 and random, made on the device."""
    synth = target_family(geometry.model_type).synth
    assert synth is not None
    fields = synth.config(geometry, geometry.eos_token_ids[0])
    kept = {name: value for name, value in fields.items() if name not in LEFT_OUT}
    config = AutoConfig.for_model(kept.pop("model_type"), **kept)
    # Its fused attention has no sinks.
    attention = "eager" if geometry.attention.sinks else "sdpa"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        )
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(0.0, INIT_STD, generator=generator)
    return model.eval().requires_grad_(False)


class Arrivals(BaseStreamer):
    """When each token came to the host."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """A token, or the prompt at first."""
        value.tolist()
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


def transformers_figures(
    model: PreTrainedModel, prompt: list[int], experts: str | None, *, compiled: bool
) -> dict[str, Any]:
    """A token's time in ``generate``; the second run counts, the first compiles.

    ``experts``: how they are run, None where the model has none.
    """
    if experts is not None:
        model.set_experts_implementation(experts)
    torch._dynamo.reset()
    model.__dict__.pop("_compiled_call", None)
    ids = torch.tensor([prompt], device=model.device)
    started_s = time.perf_counter()
    for _ in range(2):
        arrivals = Arrivals()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            cache_implementation="static",
            disable_compile=not compiled,
            streamer=arrivals,
        )
    each_ms = token_ms(arrivals.times_s[1:])
    return {
        "experts": experts, "compiled": "_compiled_call" in model.__dict__, "token_ms": each_ms,
        "tokens_per_s": round(MILLISECONDS / each_ms, 1),
        "seconds": round(time.perf_counter() - started_s, 1),
    }  # fmt: skip


def machine(device: str) -> dict[str, str]:
    """Versions, and the GPU's name."""
    name = torch.cuda.get_device_name() if device == "cuda" else device
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}


def measure(record: Record, engine: Engine, device: str) -> None:
    """Fills the record: the engine, then transformers from the safe to the slow to start."""
    target = engine.manifest.target
    prompt = np.random.default_rng(0).integers(0, target.vocab - 64, CONTEXT).tolist()
    record.values |= machine(device)
    record.values["specbuild"] = engine_figures(engine, prompt)
    print(f"specbuild: {record.values['specbuild']}", flush=True)
    record.running = "transformers: making the model"
    experts = [f for f in target.feed_forwards if isinstance(f, MoeFeedForward)]
    if experts:
        in_bf16 = (replace(experts[0], storage="bf16"),)
        target = replace(target, feed_forwards=in_bf16)
    model = random_model(target, device)
    parameters = sum(p.nbytes for p in model.parameters())
    record.values["transformers_weight_bytes"] = parameters
    print(f"transformers: {parameters / 1e9:.1f} GB of weights", flush=True)
    ways = EXPERTS if experts else (None,)
    for compiled in (False, True):
        for way in ways[: 1 if compiled else None]:
            record.running = f"transformers: experts {way}, compiled {compiled}"
            try:
                figures = transformers_figures(model, prompt, way, compiled=compiled)
            # Whatever a release of torch or transformers cannot do is a result, not an end.
            except Exception as error:
                first = (str(error).splitlines() or [""])[0]
                reason = f"{type(error).__name__}: {first}"
                record.values.setdefault("failed", {})[record.running] = reason
                print(f"{record.running}: {reason}", flush=True)
                continue
            record.values["runs"].append(figures)
            print(f"transformers: {figures}", flush=True)


def main() -> None:
    """Prints as it goes, then everything as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--seconds", type=float, default=170, help="end after this time")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    record = Record(options.json)
    timer = threading.Timer(options.seconds, record.finish, kwargs={"late": True})
    timer.daemon = True
    timer.start()
    engine = Engine.load(options.engine)
    measure(record, engine, "cuda" if engine.manifest.backend == "cuda" else "cpu")
    record.finish(late=False)


if __name__ == "__main__":
    main()
