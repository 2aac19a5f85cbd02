"""Decodes at random for a given time, and compares with plain decoding of the same engine.

Prompts, draft shapes, sampling, batches and arrivals are drawn from a seed; each prompt is also
decoded alone and without a draft. Until the tokens of the two differ, their log-probabilities have
the same contexts. Their distances are counted, separately for contexts with clear expert selection
(by transformers). The exit code is 1 if two differ at a clear choice:

    .venv/bin/python benchmarks/soak.py --engine out/demo/engine --minutes 30 \\
        --output benchmarks/results/soak.json
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specbuild.builder.verify.comparison import ROUTING_TIE
from specbuild.builder.verify.reference_target import ReferenceTarget
from specbuild.plugins_cuda.choose.op import gumbel_noise, kept_tokens
from specbuild.runtime.decode.decoder import Speculation
from specbuild.runtime.device import this_device
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape, Limits
from specbuild.runtime.measure.losslessness import NEAR_TIE, first_difference
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import Event, FinishEvent, GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny-gpt-oss"
PACKAGES = ("specbuild", "onnxruntime", "numpy", "torch", "transformers")
# Two prompts in three are a piece of the example's text, the third has any ids.
_SHARE_OF_TEXT = 2 / 3
_LONGEST_OUTPUT = 96


@dataclass(frozen=True)
class Round:
    """The requests of one batch, and their settings."""

    prompts: tuple[Prompt, ...]
    params: tuple[GenerateParams, ...]
    speculation: Speculation
    arrivals: int


@dataclass(frozen=True)
class Case:
    """A prompt, its output in a batch, and its output alone without a draft."""

    prompt: Prompt
    params: GenerateParams
    result: RunRecord
    plain: RunRecord


@dataclass
class Parting:
    """A place at which a run and plain decoding chose different tokens."""

    seed: int
    prompt: int
    at: int
    context: int
    sampling: dict[str, Any]
    tokens: tuple[int, int]
    gap: float
    routing_margin: float

    @property
    def near(self) -> bool:
        """Whether the last bits may decide it."""
        return self.gap < NEAR_TIE or self.routing_margin < ROUTING_TIE


@dataclass
class Distance:
    """The largest distance of a prompt: log-probabilities of one token in equal contexts.

    ``routing_margin`` is the minimum of any row of its context, by transformers.
    """

    distance: float
    seed: int
    prompt: int
    at: int
    context: int
    logprob: float
    routing_margin: float


@dataclass
class Distances:
    """Distances of log-probabilities: counts by power of ten, and the largest few."""

    by_power: dict[str, int] = field(default_factory=dict)
    largest: list[Distance] = field(default_factory=list)

    def add(self, distances: np.ndarray, worst: Distance) -> None:
        """Count those of a prompt."""
        for power in np.floor(np.log10(np.maximum(distances, 1e-9))).astype(int):
            name = "0" if power == -9 else f"1e{power}"
            self.by_power[name] = self.by_power.get(name, 0) + 1
        self.largest = sorted([*self.largest, worst], key=lambda d: -d.distance)[:10]


@dataclass
class Tally:
    """The results of all rounds.

    Experts are ``settled`` if no row of a context has two that are closer than a routing tie.
    """

    rounds: int = 0
    prompts: int = 0
    tokens: int = 0
    most_context: int = 0
    settled: Distances = field(default_factory=Distances)
    unsettled: Distances = field(default_factory=Distances)
    near_ties: int = 0
    partings: list[Parting] = field(default_factory=list)


def drawn_round(seed: int, text_ids: list[int], limits: Limits) -> Round:
    """Return the batch of a seed."""
    draw = random.Random(seed)
    count = draw.randint(1, 2 * limits.max_batch_size)
    lengths = [_length(draw, limits.max_seq_len - _LONGEST_OUTPUT) for _ in range(count)]
    vocab = max(text_ids)
    prompts = []
    for number, length in enumerate(lengths):
        if draw.random() < _SHARE_OF_TEXT:
            start = draw.randrange(len(text_ids))
            ids = tuple((text_ids[start:] + text_ids * 2)[:length])
        else:
            ids = tuple(draw.randint(1, vocab) for _ in range(length))
        prompts.append(Prompt(str(number), prompt_ids=ids))
    params = tuple(_params(draw) for _ in prompts)
    return Round(tuple(prompts), params, _speculation(draw, limits), draw.randint(1, 3))


def _length(draw: random.Random, maximum: int) -> int:
    """Return mostly short lengths, rarely the longest."""
    return int(2 ** draw.uniform(0, math.log2(maximum) if draw.random() < 0.1 else 9))


def _params(draw: random.Random) -> GenerateParams:
    temperature = draw.choice((0.0, 0.0, 0.2, 0.7, 1.0, 1.0, 1.5))
    sampling = SamplingParams(
        temperature=temperature,
        top_k=draw.choice((0, 0, 1, 5, 40)) if temperature else 0,
        top_p=draw.choice((1.0, 1.0, 0.95, 0.5)) if temperature else 1.0,
        seed=draw.randrange(2**31),
    )
    return GenerateParams(
        max_new_tokens=draw.randint(1, _LONGEST_OUTPUT),
        sampling=sampling,
        ignore_eos=draw.random() < 0.5,
    )


def _speculation(draw: random.Random, limits: Limits) -> Speculation:
    """Return None, the default, a chain, or a tree within the engine's limits."""
    way = draw.randrange(5)
    if way < 2:
        return "default" if way else None
    depth = draw.randint(1, limits.draft_depth)
    top_k = 1 if way == 2 else draw.randint(2, limits.draft_top_k)
    maximum = min(limits.draft_tokens, DraftShape(top_k, depth, 1).candidates)
    return DraftShape(top_k, depth, draw.randint(1, maximum))


def together(engine: Engine, inputs: Round) -> list[RunRecord]:
    """Decode all prompts of a round, which arrive in several parts during decoding."""
    step = math.ceil(len(inputs.prompts) / inputs.arrivals)
    starts = range(0, len(inputs.prompts), step)
    draw, waiting = random.Random(len(inputs.prompts)), list(starts)
    running: list[tuple[int, Iterator[Event]]] = []
    records: dict[int, RunRecord] = {}
    while waiting or running:
        if waiting and (not running or draw.random() < 0.1):
            start = waiting.pop(0)
            part = slice(start, start + step)
            events = engine.generate(
                inputs.prompts[part], inputs.params[part], speculation=inputs.speculation
            )
            running.append((start, events))
        start, events = draw.choice(running)
        event = next(events, None)
        if event is None:
            running.remove((start, events))
        elif isinstance(event, FinishEvent):
            records[start + event.request] = event.record
    return [records[i] for i in range(len(inputs.prompts))]


def alone(engine: Engine, prompt: Prompt, params: GenerateParams) -> RunRecord:
    """Decode one prompt without a draft."""
    events = engine.generate(prompt, params, speculation=None)
    return next(e.record for e in events if isinstance(e, FinishEvent))


def gap(logits: torch.Tensor, tokens: tuple[int, int], params: GenerateParams, at: int) -> float:
    """Return the change of a logit that would select the other of two tokens.

    It is half of the difference of their scores, or less if top-k or top-p nearly exclude one.
    ``at`` is the position of the last token before them.
    """
    sampling = params.sampling
    if sampling.temperature == 0:
        return float((logits[tokens[0]] - logits[tokens[1]]).abs())
    scaled = logits / sampling.temperature
    scores = (
        scaled
        + gumbel_noise(torch.tensor([sampling.noise_seed]), torch.tensor([at]), len(logits))[0]
    )
    parted = float((scores[tokens[0]] - scores[tokens[1]]).abs()) * sampling.temperature
    limits = torch.tensor([sampling.top_k]), torch.tensor([sampling.top_p])
    selected = kept_tokens(scaled[None], *limits)[0]
    edge = (
        float(scaled[selected].min() - scaled[~selected].max()) if not selected.all() else math.inf
    )
    return min(parted, edge * sampling.temperature)


def compare(tally: Tally, reference: ReferenceTarget, place: tuple[int, int], case: Case) -> None:
    """Count the distances of a prompt's two runs, and their first difference if any.

    ``place`` is the round's seed and the prompt's number.
    """
    record, plain = case.got, case.plain
    at = first_difference(record.output_ids, plain.output_ids)
    same = min(len(record.output_ids), len(plain.output_ids)) if at is None else at
    if at is None and record.finish_reason != plain.finish_reason:
        raise AssertionError(f"{place}: {record.finish_reason} for {plain.finish_reason}")
    prompt, params = case.prompt.prompt_ids or (), case.params
    states = reference.run(np.array((*prompt, *plain.output_ids[:same])))
    tally.prompts += 1
    tally.tokens += same
    tally.most_context = max(tally.most_context, len(prompt) + same)
    if same:
        assert record.logprobs is not None and plain.logprobs is not None
        distances = np.abs(np.subtract(record.logprobs[:same], plain.logprobs[:same]))
        worst = int(distances.argmax())
        context, margin = len(prompt) + worst, states.routing_margin
        result = (float(distances[worst]), *place, worst, context, plain.logprobs[worst], margin)
        counted = tally.settled if margin >= ROUTING_TIE else tally.unsettled
        counted.add(distances, Distance(*result))
    if at is not None:
        tokens = record.output_ids[at], plain.output_ids[at]
        length = len(prompt) + at
        parted = gap(torch.from_numpy(states.logits[-1]), tokens, params, length - 1)
        sampling = asdict(params.sampling)
        parting = Parting(*place, at, length, sampling, tokens, parted, states.routing_margin)
        tally.near_ties += parting.near
        tally.partings.append(parting)
        print(f"parts: {parting}", flush=True)


def soak(engine: Engine, arguments: argparse.Namespace) -> Tally:
    """Run rounds until the time is over."""
    reference = ReferenceTarget(arguments.model)
    ids = _text_ids(engine)
    tally, seed = Tally(), arguments.seed
    until = time.monotonic() + 60 * arguments.minutes
    while time.monotonic() < until:
        inputs = drawn_round(seed, ids, engine.manifest.limits)
        result = together(engine, inputs)
        for number, (prompt, params) in enumerate(zip(inputs.prompts, inputs.params, strict=True)):
            case = Case(prompt, params, result[number], alone(engine, prompt, params))
            compare(tally, reference, (seed, number), case)
        tally.rounds += 1
        seed += 1
        if tally.rounds % 20 == 0:
            worst = [d.largest[0].distance for d in (tally.settled, tally.unsettled) if d.largest]
            print(f"{tally.rounds} rounds, {tally.tokens} tokens, {worst}", flush=True)
    return tally


def _text_ids(engine: Engine) -> list[int]:
    lines = (EXAMPLE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert engine.text is not None
    maximum = engine.manifest.limits.max_seq_len
    texts = (json.loads(line)["prompt"] for line in lines)
    encoded = (engine.text.encode(text, raw=True, most_tokens=maximum) for text in texts)
    return list(chain.from_iterable(encoded))


def main() -> int:
    """Test an engine and write the record; return 1 if a run differs at a clear choice."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=Path, default=Path("out/demo/engine"))
    parser.add_argument("--model", type=Path, default=EXAMPLE / "target", help="its checkpoint")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    tally = soak(Engine.load(arguments.engine), arguments)
    record = {
        "command": " ".join(["benchmarks/soak.py", *sys.argv[1:]]),
        "machine": asdict(this_device()) | {"python": platform.python_version()},
        "versions": {name: version(name) for name in PACKAGES},
        **asdict(tally),
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))
    return int(len(tally.partings) > tally.near_ties)


if __name__ == "__main__":
    sys.exit(main())
