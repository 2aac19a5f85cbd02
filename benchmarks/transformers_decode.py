"""Decodes one sequence with transformers and with an engine, in one process on one GPU.

    specbuild synth --geometry gpt-oss-20b --unique-layers 2 --engine engine
        --backend cuda --gpu sm_90a --max-seq-len 2048 --max-batch-size 1
    python benchmarks/transformers_decode.py engine [--seconds 170] [--json FILE]

transformers has random weights of the engine's geometry in bf16 (42 GB for GPT-OSS 20B: it has no
MXFP4 without kernels from its hub) and a static cache. It runs first eagerly, with experts in two
ways, then through torch.compile as ``generate`` does. The time per token is the median between two
arrivals at the host. Measurements that do not finish in time are omitted and named.
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
# ``generate`` replaces grouped products by batched ones for the tokens after the prompt.
EXPERTS = ("grouped_mm", "eager")
# Fields of the config; the rest states the storage of weights of this geometry.
LEFT_OUT = ("quantization_config", "architectures", "torch_dtype")
INIT_STD = 0.02
MILLISECONDS = 1e3


class Record:
    """The figures so far; a thread may call ``finish`` while a measurement is blocked."""

    def __init__(self, file: Path | None) -> None:
        self._file, self._lock = file, threading.Lock()
        self.values: dict[str, Any] = {"context": CONTEXT, "tokens": TOKENS, "runs": []}
        self.running = "start"

    def finish(self, *, late: bool) -> None:
        """Print everything as JSON and end the process: a compiler cannot be interrupted."""
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
    """Return the median milliseconds between two tokens, without the first quarter."""
    steady = np.diff(arrivals_s[len(arrivals_s) // 4 :])
    return round(statistics.median(steady.tolist()) * MILLISECONDS, 4)


def engine_figures(engine: Engine, prompt: list[int]) -> dict[str, float]:
    """Return the time per token of ``Engine.generate`` without a draft."""
    params = GenerateParams(max_new_tokens=TOKENS * 4, ignore_eos=True)
    for _ in range(2):  # The first run loads programs.
        events = engine.generate([Prompt("random", tuple(prompt))], params, speculation=None)
        arrivals_s = [time.perf_counter() for event in events if isinstance(event, TokenEvent)]
    # Two steps are in flight, so tokens sometimes arrive in pairs: the mean is used.
    steady = arrivals_s[len(arrivals_s) // 4 :]
    each_ms = (steady[-1] - steady[0]) / (len(steady) - 1) * MILLISECONDS
    return {"token_ms": round(each_ms, 4), "tokens_per_s": round(MILLISECONDS / each_ms, 1)}


def random_model(geometry: TargetGeometry, device: str) -> PreTrainedModel:
    """Return transformers' model of this geometry, bf16 and random, created on the device."""
    synth = target_family(geometry.model_type).synth
    assert synth is not None
    fields = synth.config(geometry, geometry.eos_token_ids[0])
    selected = {name: value for name, value in fields.items() if name not in LEFT_OUT}
    config = AutoConfig.for_model(selected.pop("model_type"), **selected)
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
    """The arrival times of tokens at the host."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Receive a token, or the prompt at first."""
        value.tolist()
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        """See ``BaseStreamer``; nothing is held back."""


def transformers_figures(
    model: PreTrainedModel, prompt: list[int], experts: str | None, *, compiled: bool
) -> dict[str, Any]:
    """Return the time per token in ``generate``; the first run compiles, the second counts.

    ``experts`` is the implementation of experts, None if the model has none.
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
    """Return versions, and the GPU's name."""
    name = torch.cuda.get_device_name() if device == "cuda" else device
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}


def measure(record: Record, engine: Engine, device: str) -> None:
    """Measure the engine, then transformers, in the order of risk."""
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
            # A failure of a release of torch or transformers is a result and does not end the run.
            except Exception as error:
                first = (str(error).splitlines() or [""])[0]
                reason = f"{type(error).__name__}: {first}"
                record.values.setdefault("failed", {})[record.running] = reason
                print(f"{record.running}: {reason}", flush=True)
                continue
            record.values["runs"].append(figures)
            print(f"transformers: {figures}", flush=True)


def main() -> None:
    """Print progress, then everything as JSON."""
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
