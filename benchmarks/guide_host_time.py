"""Measures the host's time in guided steps of a CUDA engine, with a stand-in for the GPU.

The stand-in keeps the ports of the engine's plan and returns the tokens of given texts, so no GPU
is needed. A step takes as long as stated. A share of the tokens that the stand-in chooses without a
mask is refused by the guide. Each JSON line has the decoded tokens per second with and without a
guide, the processor time of the host for each step, tokens per step and sequence, and the calls
that queue work of the device.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from structured_output import SCHEMAS
from tokenizers import Tokenizer

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_file, read_manifest
from specbuild.runtime.engine_dir.plan import (
    ADJUSTED_DONE,
    FORCED,
    FORCED_ROWS,
    MASKED_ROW,
    OFFERED,
    Plan,
    Port,
    ProgramEntry,
)
from specbuild.runtime.executors.cuda.check import read_plan
from specbuild.runtime.executors.executor import ExecutorCapabilities, StepResult
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt, TokenEvent
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.text.codec import TextCodec
from specbuild.runtime.text.tokenizer import TOKENIZER_FILE

_EXAMPLES = """examples:
  python benchmarks/guide_host_time.py engine --step-us 340 --batch 1 8
  python benchmarks/guide_host_time.py engine --step-us 0 --refused 0.05
"""
_RING = 64


class ScriptedDevice:
    """A device executor: sequence b chooses the tokens of ``texts[seed of b]``, again and again.

    At the places in ``refused`` it chooses ``wrong_token`` unless a mask applies. A step takes
    ``step_s``.
    """

    prompt_tokens = 16
    capabilities = ExecutorCapabilities("cuda", batch_invariant=True, device_step=True)

    def __init__(self, plan: Plan, step_s: float) -> None:
        self.plan, self.step_s = plan, step_s
        self.texts: Sequence[Sequence[int]] = ()
        self.refused: Sequence[frozenset[int]] = ()
        self.calls: Counter[str] = Counter()
        self.steps = 0
        self._ports = {p.name: p for p in plan.ports}
        self._values: dict[str, np.ndarray] = {}
        self.wrong_token = 0
        # Seconds in which the stand-in itself computed, which is none of the host's time.
        self.own_s = self.own_cpu_s = 0.0
        self._results: dict[int, StepResult] = {}
        self._ready = [0.0] * _RING

    def _of(self, name: str) -> np.ndarray:
        if name not in self._values:
            port = self._ports[name]
            dtype = np.float32 if port.dtype == "float32" else np.int32
            self._values[name] = np.zeros(port.shape, dtype)
        return self._values[name]

    def use(self) -> None:
        """Do nothing."""

    def port(self, name: str) -> Port | None:
        return self._ports.get(name)

    def write(self, name: str, values: np.ndarray, *, row: int = 0) -> None:
        self.calls["write"] += 1
        flat, first = self._of(name).reshape(-1), row * self._of(name)[0].size
        flat[first : first + values.size] = values.reshape(-1)

    def fill(self, name: str, value: float, *, row: int = 0, rows: int = 1) -> None:
        self.calls["fill"] += 1
        self._of(name)[row : row + rows] = value

    def copy(self, source: str, row: int, target: str, target_row: int) -> None:
        self.calls["copy"] += 1
        self._of(target)[target_row] = self._of(source)[row]

    def read(self, name: str, *, rows: int | None = None) -> np.ndarray:
        return self._of(name)[:rows].copy()

    def fetch(self, name: str) -> Callable[[], np.ndarray]:
        self.calls["fetch"] += 1
        values = self._of(name).copy()
        return lambda: values

    def prepare(self, entry: ProgramEntry) -> None:
        """Do nothing: there is nothing to load."""

    def start(self, entry: ProgramEntry, step: int | None = None) -> None:
        self.calls["start"] += 1
        if entry.kind == "prefill":
            for row in range(entry.batch):
                self._of("prefill.choice")[row] = self.texts[int(self._of("prefill.seed")[row])][0]
        if step is None:
            return
        begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
        results = [self._step(entry, row) for row in range(entry.batch)]
        self._results[step % _RING] = StepResult(
            [len(tokens) for tokens in results],
            [max(len(tokens) - 1, 0) for tokens in results],
            results,
            [[-0.5] * len(tokens) for tokens in results],
        )
        self.own_s += time.perf_counter() - begun_s
        self.own_cpu_s += time.thread_time() - begun_cpu_s
        before_s = self._ready[(step - 1) % _RING]
        self._ready[step % _RING] = max(before_s, time.perf_counter()) + self.step_s

    def _step(self, entry: ProgramEntry, row: int) -> list[int]:
        """Return the tokens that the step emits for a row, and advance its state."""
        done = self._of(ADJUSTED_DONE if entry.changes_logits else "done")
        if done[row]:
            return []
        seed, length = int(self._of("seed")[row]), self._of("length")
        text, place = self.texts[seed], int(length[row]) - self.prompt_tokens + 1
        chain: list[int] = []
        changes = int(self._of("changes")[row]) if entry.full_logits else 0
        forced = int(self._of(FORCED)[row]) if changes & FORCED_ROWS else 0
        if entry.host_proposal:
            offered, width = self._of(OFFERED), entry.draft_tokens + 1
            first = entry.batch + row * width + 1
            chain = offered[first : first + offered[row] - 1].tolist()
        tokens: list[int] = []
        for i in range(len(chain) + 1):
            is_masked = bool(changes & MASKED_ROW) and i == forced
            at = (place + i) % len(text)
            is_refused = not is_masked and at in self.refused[seed]
            tokens.append(chain[i] if i < forced else self.wrong_token if is_refused else text[at])
            if i == len(chain) or chain[i] != tokens[-1]:
                break
        left = int(self._of("limit")[row]) - int(length[row]) - 1
        tokens = tokens[:left]
        if not self._of("ignore_eos")[row]:
            ends = [i for i, token in enumerate(tokens) if token in self._of("eos_ids")]
            tokens = tokens[: ends[0] + 1] if ends else tokens
            done[row] = bool(ends)
        done[row] |= len(tokens) == left
        length[row] += len(tokens)
        self._of("root")[row] = tokens[-1]
        return tokens

    def wait_step(self, number: int, batch: int) -> StepResult:
        del batch
        begun_s = time.thread_time()
        while time.perf_counter() < self._ready[number % _RING]:
            pass
        self.own_cpu_s += time.thread_time() - begun_s
        self.steps += 1
        return self._results[number % _RING]

    def synchronize(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def texts_of(engine: Engine, tokenizer: Tokenizer, guide: Guide, count: int) -> list[list[int]]:
    """Return outputs of a guide, as tokens: random words where its masks allow them."""
    random, texts = Random(1), []
    drawn = [" value", " returns", " the", " list", " of", " is", " x", " 1", *'"]},:']
    words = [tokenizer.encode(word, add_special_tokens=False).ids[0] for word in drawn]
    for _ in range(count):
        state, output = engine.compile(guide).begin(), np.zeros(0, np.int32)
        while (mask := state.mask(output)) is not None:
            allowed = [word for word in words if mask.allows(word)]
            allowed = allowed or [t for t in range(8 * len(mask.bits)) if mask.allows(t)]
            token = next(iter(state.forced(output)), random.choice(allowed))
            output = np.append(output, np.int32(token))
        texts.append(output.tolist())
    return texts


def decoded(
    engine: Engine,
    device: ScriptedDevice,
    batch: int,
    params: GenerateParams,
    setting: DraftSetting,
) -> dict[str, Any]:
    """Decode until the first sequence ends; return the rate and the host's time per step."""
    ids = tuple(range(5, 5 + device.prompt_tokens))
    prompts = [Prompt(str(i), prompt_ids=ids) for i in range(batch)]
    each = [replace(params, sampling=SamplingParams(seed=i)) for i in range(batch)]
    requests = engine.check_prompts(prompts, each)
    tokens = 0
    with engine.session.exclusive(requests, setting) as events:
        for event in events:
            if isinstance(event, FinishEvent):
                break
            if isinstance(event, TokenEvent):
                # All prompts end in one launch; from then on everything is of steps.
                tokens += 1
                if tokens == batch:
                    device.calls.clear()
                    device.steps, device.own_s, device.own_cpu_s = 0, 0.0, 0.0
                    started_s, started_cpu_s = time.perf_counter(), time.thread_time()
    steps = device.steps
    span_s = time.perf_counter() - started_s - device.own_s
    cpu_s = time.thread_time() - started_cpu_s - device.own_cpu_s
    return {
        "tokens_per_s": round((tokens - batch) / span_s),
        "host_us": round(1e6 * cpu_s / steps, 1),
        "tokens_per_step": round((tokens - batch) / steps / batch, 2),
        "calls": {name: round(count / steps, 2) for name, count in sorted(device.calls.items())},
    }


def main() -> None:
    """Print one JSON line for each schema and batch."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path, help="an engine for CUDA with a tokenizer")
    parser.add_argument("--batch", metavar="N", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--step-us", metavar="T", type=float, default=0, help="of every step (0)")
    parser.add_argument("--refused", metavar="P", type=float, default=0.02, help="share (0.02)")
    parser.add_argument("--rounds", metavar="N", type=int, default=5, help="medians of (5)")
    args = parser.parse_args()
    manifest = read_manifest(args.engine)
    device = ScriptedDevice(read_plan(args.engine, manifest), args.step_us * 1e-6)
    file = bytes(read_file(args.engine, manifest, TOKENIZER_FILE))
    engine = Engine(manifest, device, text=TextCodec(file, None, None))
    tokenizer = Tokenizer.from_str(file.decode())
    # JSON allows no line feed within a string, and guides allow none outside of strings.
    [device.wrong_token] = tokenizer.encode("\n", add_special_tokens=False).ids
    eos = manifest.target.eos_token_ids[0]
    for name, schema in SCHEMAS.items():
        guide = Guide.json(json.dumps(schema))
        texts = texts_of(engine, tokenizer, guide, max(args.batch))
        device.texts = [[*text, eos] for text in texts]
        random = Random(2)
        device.refused = [
            frozenset(i for i in range(len(text)) if random.random() < args.refused)
            for text in texts
        ]
        tokens = min(map(len, device.texts)) - 1
        plain = GenerateParams(tokens, ignore_eos=True)
        guided = GenerateParams(512, guide=guide)
        for batch in args.batch:
            runs: dict[str, list[dict[str, Any]]] = {"without": [], "with": []}
            for _ in range(args.rounds):
                runs["without"].append(decoded(engine, device, batch, plain, DraftSetting(None)))
                runs["with"].append(decoded(engine, device, batch, guided, DraftSetting()))
            result: dict[str, Any] = {"schema": name, "batch": batch}
            for kind, each in runs.items():
                middle = sorted(each, key=lambda run: run["tokens_per_s"])[len(each) // 2]
                result[kind] = middle
            rates = [result[kind]["tokens_per_s"] for kind in ("with", "without")]
            print(json.dumps({**result, "ratio": round(rates[0] / rates[1], 2)}), flush=True)


if __name__ == "__main__":
    main()
