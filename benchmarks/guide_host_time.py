"""Measures the host's time in guided steps of a CUDA engine, with a stand-in for the GPU.

The stand-in keeps the ports of the engine's plan and returns the tokens of given outputs, so no GPU
is needed. Time is simulated: the host's part is the processor time of its thread, so other work on
the machine adds little. Calls of the driver, steps and waits take assumed times. The thread that
reads the events is not simulated; in an engine it competes with the decoding thread.

By default an output has random words, and a share of the tokens is refused by the guide. A file of
outputs has real ones: by schema, for each prompt the tokens of ``output`` and in ``choice`` those
that the model chooses there without a guide. Each JSON line has the tokens per second with and
without a guide, the time and the host's part of a step, and how often programs and calls ran.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.text.codec import TextCodec
from specbuild.runtime.text.tokenizer import TOKENIZER_FILE

_EXAMPLES = """examples:
  python benchmarks/guide_host_time.py engine --step-us 350 --batch 1
  python benchmarks/guide_host_time.py engine --outputs outputs.json --batch 8
"""
_RING = 64
_PROMPT_TOKENS = 16
# Assumed seconds of the host's calls of the driver, of the device for each of them, of a thread
# that wakes up after a wait, and of steps in addition to those without logits and without chains.
_CALL_S, _LAUNCH_S, _DEVICE_CALL_S, _WAKE_S = 6e-6, 12e-6, 3e-6, 40e-6
_LOGITS_S, _CHAINS_S, _PREFILL_S = 50e-6, 100e-6, 1e-3


@dataclass(frozen=True)
class Output:
    """The tokens of a guided output, and by place what the model chooses instead without a mask."""

    tokens: Sequence[int]
    refused: Mapping[int, int]


class ScriptedDevice:
    """A device executor: sequence b chooses the tokens of ``outputs[seed of b]``, again and again.

    At the places in ``refused`` it chooses another token unless a mask applies. A step takes
    ``step_s``, and runs while the host works. ``now_s`` is the simulated time.
    """

    capabilities = ExecutorCapabilities("cuda", batch_invariant=True, device_step=True)

    def __init__(self, plan: Plan, step_s: float) -> None:
        self.plan, self.step_s = plan, step_s
        self.outputs: Sequence[Output] = ()
        self.calls: Counter[str] = Counter()
        self.programs: Counter[str] = Counter()
        self.steps = 0
        self._ports = {p.name: p for p in plan.ports}
        self._values: dict[str, np.ndarray] = {}
        # Processor time in which the stand-in itself computed, which is none of the host's time.
        self._own_s = 0.0
        # Simulated time that is not the host's processor time, and when the device is idle next.
        self._added_s = self._idle_at_s = 0.0
        self._results: dict[int, StepResult] = {}
        self._ready_s = [0.0] * _RING
        self._newest = -1

    @property
    def host_s(self) -> float:
        """Processor time of the host so far."""
        return time.thread_time() - self._own_s

    @property
    def now_s(self) -> float:
        """The simulated time."""
        return self.host_s + self._added_s

    def _call(self, name: str, call_s: float = _CALL_S, device_s: float = _DEVICE_CALL_S) -> None:
        """Count a call, and let the host and the device spend time on it."""
        self.calls[name] += 1
        self._added_s += call_s
        self._idle_at_s = max(self._idle_at_s, self.now_s) + device_s

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
        self._call("write")
        flat, first = self._of(name).reshape(-1), row * self._of(name)[0].size
        flat[first : first + values.size] = values.reshape(-1)

    def fill(self, name: str, value: float, *, row: int = 0, rows: int = 1) -> None:
        self._call("fill")
        self._of(name)[row : row + rows] = value

    def copy(self, source: str, row: int, target: str, target_row: int) -> None:
        self._call("copy")
        self._of(target)[target_row] = self._of(source)[row]

    def read(self, name: str, *, rows: int | None = None) -> np.ndarray:
        return self._of(name)[:rows].copy()

    def fetch(self, name: str) -> Callable[[], np.ndarray]:
        self._call("fetch", 2 * _CALL_S)
        values = self._of(name).copy()
        return lambda: values

    def prepare(self, entry: ProgramEntry) -> None:
        """Do nothing: there is nothing to load."""

    def start(self, entry: ProgramEntry, step: int | None = None) -> None:
        begun_s = time.thread_time()
        if entry.kind == "prefill":
            for row in range(entry.batch):
                output = self.outputs[int(self._of("prefill.seed")[row])]
                self._of("prefill.choice")[row] = output.tokens[0]
        results = [self._step(entry, row) for row in range(entry.batch) if step is not None]
        self._own_s += time.thread_time() - begun_s
        device_s = _PREFILL_S if step is None else self.step_s
        device_s += _LOGITS_S * entry.full_logits + _CHAINS_S * entry.host_proposal
        self.programs[entry.name] += 1
        self._call("start", _LAUNCH_S, device_s)
        if step is None:
            return
        self._results[step % _RING] = StepResult(
            [len(tokens) for tokens in results],
            [max(len(tokens) - 1, 0) for tokens in results],
            results,
            [[-0.5] * len(tokens) for tokens in results],
        )
        self._ready_s[step % _RING], self._newest = self._idle_at_s, step

    def _step(self, entry: ProgramEntry, row: int) -> list[int]:
        """Return the tokens that the step emits for a row, and advance its state."""
        done = self._of(ADJUSTED_DONE if entry.changes_logits else "done")
        if done[row]:
            return []
        seed, length = int(self._of("seed")[row]), self._of("length")
        output, place = self.outputs[seed], int(length[row]) - _PROMPT_TOKENS + 1
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
            at = (place + i) % len(output.tokens)
            token = output.tokens[at] if is_masked else output.refused.get(at, output.tokens[at])
            tokens.append(chain[i] if i < forced else token)
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
        wait_s = self._ready_s[number % _RING] - self.now_s
        if wait_s > 0:
            # A thread that waits for the newest step polls. Otherwise it sleeps.
            self._added_s += wait_s + (_WAKE_S if number < self._newest else 0.0)
        self.steps += 1
        return self._results[number % _RING]

    def synchronize(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def random_outputs(
    engine: Engine, tokenizer: Tokenizer, guide: Guide, count: int, refused: float
) -> list[Output]:
    """Return outputs of a guide: random words where its masks allow them."""
    random, outputs = Random(1), []
    drawn = [" value", " returns", " the", " list", " of", " is", " x", " 1", *'"]},:']
    words = [tokenizer.encode(word, add_special_tokens=False).ids[0] for word in drawn]
    # JSON allows no line feed within a string, and guides allow none outside of strings.
    [wrong] = tokenizer.encode("\n", add_special_tokens=False).ids
    for _ in range(count):
        state, output = engine.compile(guide).begin(), np.zeros(0, np.int32)
        while (mask := state.mask(output)) is not None:
            allowed = [word for word in words if mask.allows(word)]
            allowed = allowed or [t for t in range(8 * len(mask.bits)) if mask.allows(t)]
            token = next(iter(state.forced(output)), random.choice(allowed))
            output = np.append(output, np.int32(token))
        places = [i for i in range(len(output)) if random.random() < refused]
        outputs.append(Output(output.tolist(), dict.fromkeys(places, wrong)))
    return outputs


def read_outputs(file: Path, schema: str) -> list[Output]:
    """Return the outputs of a schema in a file."""
    return [
        Output(
            each["output"],
            {i: c for i, c in enumerate(each["choice"]) if c != each["output"][i]},
        )
        for each in json.loads(file.read_text())[schema]
    ]


def decoded(
    engine: Engine,
    device: ScriptedDevice,
    batch: int,
    params: GenerateParams,
    setting: DraftSetting,
) -> dict[str, Any]:
    """Decode a batch; return the rates and times after the first token of its last sequence."""
    prompts = [Prompt(str(i), prompt_ids=tuple(range(5, 5 + _PROMPT_TOKENS))) for i in range(batch)]
    each = [replace(params, sampling=SamplingParams(seed=i)) for i in range(batch)]
    requests = engine.check_prompts(prompts, each)
    tokens, row_steps, rate = 0, 0, 0.0
    begun: dict[int, float] = {}
    started_s = started_host_s = 0.0
    with engine.session.exclusive(requests, setting) as events:
        for event in events:
            if isinstance(event, FinishEvent):
                output, row_steps = event.record.output_ids, row_steps + event.record.stats.steps
                if params.guide is not None:
                    expected = device.outputs[event.request].tokens
                    assert [*output[: len(expected)]] == [*expected], "the tokens differ"
                rate += (len(output) - 1) / (device.now_s - begun[event.request]) / batch
                continue
            tokens += 1
            if event.request not in begun:
                begun[event.request] = started_s = device.now_s
                started_host_s = device.host_s
                if len(begun) == batch:
                    device.calls.clear()
                    device.programs.clear()
                    device.steps = tokens = 0
    span_s, steps = device.now_s - started_s, device.steps
    return {
        "tokens_per_s": round(tokens / span_s),
        "tokens_per_s_and_sequence": round(rate),
        "step_us": round(1e6 * span_s / steps),
        "host_us": round(1e6 * (device.host_s - started_host_s) / steps, 1),
        "tokens_per_row": round(tokens / row_steps, 2),
        "programs": dict(device.programs.most_common()),
        "calls": {name: round(count / steps, 2) for name, count in sorted(device.calls.items())},
    }


def main() -> None:
    """Print one JSON line for each schema and batch."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path, help="an engine for CUDA with a tokenizer")
    parser.add_argument("--batch", metavar="N", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--step-us", metavar="T", type=float, default=430, help="of a step (430)")
    parser.add_argument("--outputs", metavar="FILE", type=Path, help="outputs; else random words")
    parser.add_argument("--refused", metavar="P", type=float, default=0.02, help="share (0.02)")
    parser.add_argument("--rounds", metavar="N", type=int, default=5, help="medians of (5)")
    args = parser.parse_args()
    manifest = read_manifest(args.engine)
    device = ScriptedDevice(read_plan(args.engine, manifest), args.step_us * 1e-6)
    file = bytes(read_file(args.engine, manifest, TOKENIZER_FILE))
    engine = Engine(manifest, device, text=TextCodec(file, None, None))
    tokenizer = Tokenizer.from_str(file.decode())
    plain = GenerateParams(96, ignore_eos=True)
    for name, schema in SCHEMAS.items():
        guide = Guide.json(json.dumps(schema))
        if args.outputs is None:
            count = max(args.batch)
            device.outputs = random_outputs(engine, tokenizer, guide, count, args.refused)
        else:
            device.outputs = read_outputs(args.outputs, name)
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
            for ratio, of in (
                ("ratio", "tokens_per_s"),
                ("ratio_per_sequence", "tokens_per_s_and_sequence"),
            ):
                result[ratio] = round(result["with"][of] / result["without"][of], 3)
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
