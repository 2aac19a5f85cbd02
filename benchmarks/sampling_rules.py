"""Tokens per step of sampled requests by the rule that proposes and accepts draft tokens.

The target's own samples are read again by the target and, in chains from every position, by its
EAGLE3 draft. Both full distributions at each position give the exact chance of acceptance:

- argmax: the draft proposes its most likely token;
- shared noise: the draft adds the target's noise, at several ratios of its temperature to that of
  the request, over the candidates to which the runtime adds noise;
- token rejection: the draft samples q, and a token is accepted with probability min(1, p/q).

    specbuild build --model examples/tiny-gpt-oss/target --output engine
    python benchmarks/sampling_rules.py engine --model examples/tiny-gpt-oss/target \\
      --draft examples/tiny-gpt-oss/draft --prompts examples/tiny-gpt-oss/prompts.jsonl \\
      --output record.json

With --top-p or --min-p the target's distribution is cut, and shared noise is computed with the
same cut of q and without it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from specbuild import Engine, GenerateParams, Prompt
from specbuild.builder.checkpoint.source import open_directory
from specbuild.builder.families.eagle3.config import AUX_LAYERS
from specbuild.builder.training.draft_layers import DraftShape
from specbuild.builder.training.draft_module import DraftModule
from specbuild.builder.training.frozen_target import FrozenTarget, load_target
from specbuild.builder.training.initial_draft import load_initial_weights
from specbuild.runtime.device import this_device
from specbuild.runtime.draft.shared_noise import CANDIDATES, TEMPERATURE_RATIO
from specbuild.runtime.request import FinishEvent

LEVELS = 3
RATIOS = (0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True)
class Cut:
    """Tokens of small probability that a request excludes."""

    top_p: float = 1.0
    min_p: float = 0.0

    def of(self, p: torch.Tensor) -> torch.Tensor:
        """Return ``p`` [R, V] without the excluded tokens, renormalized."""
        if self.top_p < 1 or self.min_p > 0:
            ordered, order = p.sort(dim=-1, descending=True)
            selected = ordered >= self.min_p * ordered[:, :1]
            mass = ordered * selected
            before = mass.cumsum(dim=-1) - mass
            selected &= before < self.top_p * mass.sum(dim=-1, keepdim=True)
            selected[:, 0] = True
            p = torch.zeros_like(p).scatter(-1, order, ordered * selected)
        return p / p.sum(dim=-1, keepdim=True)


def argmax_rate(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Whether the most likely token of ``q`` [R, V] is ``x`` [R]: [R]."""
    return (q.argmax(dim=-1) == x).to(q.dtype)


def rejection_rate(p: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The chance that the target's sample ``x`` [R] is an accepted sample of ``q``: [R]."""
    p_x, q_x = (t.gather(-1, x[:, None])[:, 0] for t in (p, q))
    return (q_x / p_x).clamp(max=1)


def shared_noise_rate(p: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The chance that the draft chooses the target's sample ``x`` [R] by the same noise: [R].

    Both choose x with probability 1 / Σ_y max(p_y / p_x, q_y / q_x) (arXiv 2408.07978).
    """
    p_x, q_x = (t.gather(-1, x[:, None]) for t in (p, q))
    both = 1 / torch.maximum(p / p_x, q / q_x.clamp(min=1e-30)).sum(dim=-1)
    return torch.where(q_x[:, 0] > 0, both / p_x[:, 0], 0)


class Pair:
    """A target and its EAGLE3 draft, which read whole texts."""

    def __init__(self, model: Path, draft: Path) -> None:
        config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
        loaded = load_target(model)
        shape = DraftShape(
            hidden=config["hidden_size"],
            target_hidden=config["target_hidden_size"],
            aux_layers=tuple(config["eagle_config"][AUX_LAYERS]),
            vocab=config["draft_vocab_size"],
            inner=config["intermediate_size"],
            q_heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            rope_theta=config["rope_theta"],
            rms_eps=config["rms_norm_eps"],
        )
        self.draft = DraftModule(shape)
        load_initial_weights(draft, self.draft)
        self.target = FrozenTarget(loaded, shape.aux_layers)
        self.embedding = loaded.get_input_embeddings().weight
        offsets = open_directory(draft)["d2t"].load().long()
        self.target_ids = offsets + torch.arange(len(offsets))

    @torch.no_grad()
    def logits(
        self, ids: torch.Tensor, first: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield the target's and the draft's logits [R, V] and the tokens [R] of each level.

        A chain begins at every position from ``first`` on at which all levels are in the text.
        """
        taught = self.target.teach(ids[None])
        rows = len(ids) - LEVELS - 1
        embedded = torch.nn.functional.embedding(ids[None, 1:-1], self.embedding)
        for level, logits in enumerate(
            self.draft.steps(taught.aux_hidden[:, :rows], embedded, LEVELS)
        ):
            drafted = torch.full((rows, taught.logits.shape[-1]), -torch.inf)
            drafted[:, self.target_ids] = logits[0]
            ahead = slice(first + level + 1, rows + level + 1)
            yield taught.logits[0, ahead], drafted[first:], ids[first + level + 2 :][: rows - first]


def candidates(logits: torch.Tensor) -> torch.Tensor:
    """Return logits [R, V] of the tokens that the runtime considers; others are -inf."""
    best = logits.topk(CANDIDATES, dim=-1)
    return torch.full_like(logits, -torch.inf).scatter(-1, best.indices, best.values)


def level_rates(
    p: torch.Tensor, logits: torch.Tensor, x: torch.Tensor, temperature: float, cut: Cut
) -> dict[str, torch.Tensor]:
    """The chance of acceptance of ``x`` [R] by rule; ``p`` [R, V] is cut, ``logits`` are not."""
    q = torch.softmax(logits / temperature, dim=-1)
    rates = {"argmax": argmax_rate(q, x), "token rejection": rejection_rate(p, cut.of(q), x)}
    near = candidates(logits)
    for ratio in RATIOS:
        drawn = torch.softmax(near / (ratio * temperature), dim=-1)
        rates[f"shared noise, {ratio}"] = shared_noise_rate(p, drawn, x)
        if cut != Cut():
            selected = cut.of(torch.softmax(near / temperature, dim=-1)) > 0
            rates[f"shared noise, {ratio}, q cut"] = shared_noise_rate(p, drawn * selected, x)
    return rates


def measure(
    engine: Engine, pair: Pair, prompts: Sequence[Prompt], params: GenerateParams
) -> dict[str, Any]:
    """Tokens per step of a chain by rule, over every position of the target's samples."""
    temperature = params.sampling.temperature
    cut = Cut(params.sampling.top_p, params.sampling.min_p)
    accepted: dict[str, float] = {}
    rows, entropy, distance = 0, 0.0, 0.0
    for event in engine.generate(prompts, params, drafter="none"):
        if not isinstance(event, FinishEvent) or len(event.record.output_ids) <= LEVELS + 1:
            continue
        ids = torch.tensor([*event.record.prompt_ids, *event.record.output_ids])
        first = len(event.record.prompt_ids) - 1
        chance: dict[str, torch.Tensor] = {}
        for level, (logits, drafted, x) in enumerate(pair.logits(ids, first)):
            p = cut.of(torch.softmax(logits / temperature, dim=-1))
            for rule, rate in level_rates(p, drafted, x, temperature, cut).items():
                chance[rule] = chance.get(rule, torch.ones(len(x))) * rate
                accepted[rule] = accepted.get(rule, 0.0) + float(chance[rule].sum())
            if level == 0:
                rows += len(x)
                entropy -= float(torch.special.xlogy(p, p).sum())
                q = torch.softmax(drafted / temperature, dim=-1)
                distance += float((p - q).abs().sum()) / 2
    steps = {rule: round(1 + total / rows, 4) for rule, total in accepted.items()}
    best = steps["token rejection"]
    return {
        "positions": rows,
        "entropy_nats": round(entropy / rows, 3),
        "tv": round(distance / rows, 3),
        "tokens_per_step": steps,
        "over_token_rejection": {rule: round(value / best, 4) for rule, value in steps.items()},
    }


def read_prompts(file: Path, count: int) -> list[Prompt]:
    """The first prompts of a file of lines with ``prompt`` or ``messages``."""
    lines = file.read_text(encoding="utf-8").splitlines()[:count]
    return [Prompt(**{"id": str(i)} | json.loads(line)) for i, line in enumerate(lines)]


def main() -> None:
    """Print the figures, and write them to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path, help="an engine of the target")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines, as of run")
    parser.add_argument("--count", type=int, default=24, help="prompts (24)")
    parser.add_argument("--tokens", type=int, default=160, help="tokens of each answer (160)")
    parser.add_argument("--temperature", type=float, action="append", help="0.8 and 1 by default")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--date", default="")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    pair, prompts = Pair(args.model, args.draft), read_prompts(args.prompts, args.count)
    figures = {}
    with Engine.load(args.engine) as engine:
        for temperature in args.temperature or (0.8, 1.0):
            params = GenerateParams(
                max_new_tokens=args.tokens, temperature=temperature, top_p=args.top_p,
                min_p=args.min_p, seed=1,
            )  # fmt: skip
            figures[str(temperature)] = measure(engine, pair, prompts, params)
            print(temperature, json.dumps(figures[str(temperature)], indent=1), flush=True)
    record = {
        "command": "python benchmarks/sampling_rules.py",
        "date": args.date,
        "processor": this_device().cpu_name,
        "versions": {name: version(name) for name in ("specbuild", "torch", "onnxruntime")},
        "model": args.model.name,
        "levels": LEVELS,
        "ratio_of_the_runtime": float(TEMPERATURE_RATIO),
        "top_p": args.top_p,
        "min_p": args.min_p,
        "temperatures": figures,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
