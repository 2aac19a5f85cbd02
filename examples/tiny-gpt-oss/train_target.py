"""Train the example target on one GPU, and write it in Hugging Face format.

From scratch; or, with ``--initial``, from a written target on, with ``--recall`` on rows of
``recall_text.py`` among the corpus, so that it recalls over its whole context:

    python train_target.py --corpus ../../out/corpus --initial target \\
      --recall ../../out/recall/train.npy --time-limit-s 100 --output ../../out/long

``--resume`` goes on where a run with the same arguments was stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from export import load_target, save_target
from geometry import Geometry
from model import Positions, Target, make_positions
from muon import Muon
from torch import Tensor

MUON_FIELDS = {"q", "k", "v", "o", "gate_up", "down"}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What decides the result, besides the text. Points in time are fractions of the run."""

    tokens_per_step: int = 65536
    short_length: int = 1024
    long_length: int = 4096
    long_from: float = 0.75
    quantised_from: float = 0.50
    warm_up: float = 0.02
    decay_from: float = 0.30
    muon_rate: float = 0.025
    embedding_rate: float = 0.03
    head_rate: float = 0.006
    vector_rate: float = 0.006
    weight_decay: float = 0.15
    dropout: float = 0.12
    balance: float = 0.01
    recall_share: float = 0.0

    def rate(self, progress: float) -> float:
        """Return the factor on all learning rates: warm-up, constant, linear to zero."""
        return min(1.0, progress / self.warm_up, max(0.0, 1 - progress) / (1 - self.decay_from))


# From a trained model on: no position is new to it, so that all sequences are long, and the rates
# are a third of those that it was trained with.
CONTINUED = Recipe(
    short_length=4096,
    long_from=0.0,
    quantised_from=0.0,
    warm_up=0.05,
    muon_rate=0.008,
    embedding_rate=0.01,
    head_rate=0.002,
    vector_rate=0.002,
    dropout=0.05,
    recall_share=0.35,
)
STATE_FILE = "training_state.pt"


class Documents:
    """The training ids on the device, served in a new order of documents every epoch."""

    def __init__(self, ids: np.ndarray, end_of_text: int, device: torch.device) -> None:
        self.ids = torch.from_numpy(ids.astype(np.int32)).to(device)
        ends = np.flatnonzero(ids == end_of_text) + 1
        self.starts = torch.from_numpy(np.concatenate(([0], ends[:-1]))).to(device)
        self.sizes = torch.from_numpy(np.diff(ends, prepend=0)).to(device)

    def epoch(self, length: int, generator: torch.Generator) -> Tensor:
        """Return int32 [n, length + 1] of all documents, shuffled, cut at a random phase."""
        device = self.ids.device
        order = torch.randperm(len(self.sizes), generator=generator).to(device)
        sizes = self.sizes[order]
        before = sizes.cumsum(0) - sizes
        index = torch.arange(len(self.ids), device=device) + torch.repeat_interleave(
            self.starts[order] - before, sizes
        )
        phase = int(torch.randint(length, (1,), generator=generator))
        count = (len(index) - phase - 1) // length
        rows = phase + length * torch.randperm(count, generator=generator).to(device)
        return self.ids[index[rows[:, None] + torch.arange(length + 1, device=device)]]


@torch.no_grad()
def mean_loss(
    model: Target, ids: Tensor, positions: Positions, *, dtype: torch.dtype, quantised: bool
) -> float:
    """Return the mean cross-entropy in nats per token of ids [n, T + 1]."""
    total = 0.0
    for rows in ids.split(32):
        x, _ = model.states(rows[:, :-1], positions, dtype=dtype, quantised=quantised)
        total += model.losses(x, rows[:, 1:].long()).sum().item()
    return total / ids[:, 1:].numel()


class Optimisers:
    """Muon for the matrices of the layers, AdamW for embeddings and vectors."""

    def __init__(self, model: Target, recipe: Recipe) -> None:
        self.recipe = recipe
        named = list(model.named_parameters())
        matrices = [p for name, p in named if name.rpartition(".")[2] in MUON_FIELDS]
        vectors = [
            p
            for name, p in named
            if name.startswith("blocks.") and name.split(".")[2] not in MUON_FIELDS
        ]
        self.muon = Muon(matrices, weight_decay=recipe.weight_decay)
        self.rates = (recipe.embedding_rate, recipe.head_rate, recipe.vector_rate)
        self.adam = torch.optim.AdamW(
            [
                {"params": [model.embedding], "weight_decay": 0.2 * recipe.weight_decay},
                {"params": [model.head], "weight_decay": recipe.weight_decay},
                {"params": [*vectors, model.norm], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            fused=model.head.is_cuda,
        )

    def state(self) -> dict[str, Any]:
        """Return what a later run needs to go on."""
        return {"adam": self.adam.state_dict(), "muon": self.muon.buffers}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        self.adam.load_state_dict(state["adam"])
        for buffer, stored in zip(self.muon.buffers, state["muon"], strict=True):
            buffer.copy_(stored)

    def step(self, factor: float) -> None:
        """Update all parameters at `factor` times the recipe's rates."""
        for group, rate in zip(self.adam.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.adam.step()
        self.muon.step(self.recipe.muon_rate * factor)


class Trainer:
    """One run: warm start of the compiler, the loop, its log."""

    def __init__(
        self, args: argparse.Namespace, recipe: Recipe, geometry: Geometry | None = None
    ) -> None:
        torch.manual_seed(args.seed)
        self.args, self.recipe = args, recipe
        self.device = torch.device(args.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.generator = torch.Generator().manual_seed(args.seed)
        geometry = geometry or Geometry()
        model = load_target(args.initial, geometry) if args.initial else Target(geometry)
        self.model = model.to(self.device)
        self.positions = {
            length: make_positions(geometry, length, self.device)
            for length in (recipe.short_length, recipe.long_length)
        }
        self.optimisers = Optimisers(self.model, recipe)
        if self.device.type == "cuda":
            self.model.compiled()
        train, held_out = (np.load(args.corpus / f"{name}.npy") for name in ("train", "held_out"))
        self.documents = Documents(train, geometry.end_of_text, self.device)
        self.held_out = torch.from_numpy(held_out.astype(np.int32)).to(self.device)
        self.recall = None
        if args.recall is not None:
            rows = np.load(args.recall).astype(np.int32)
            self.recall = torch.from_numpy(rows).to(self.device)
        self.log: list[dict[str, float]] = []
        self.step, self.tokens, self.time_s = 0, 0, 0.0
        self.queue: list[Tensor] = []

    def evaluate(self, length: int, *, quantised: bool, seen: bool = False) -> float:
        """Return the loss of the held-out text, or of as much `seen` training text."""
        count = min(
            (len(self.held_out) - 1) // length, self.args.held_out_sequences * 1024 // length
        )
        index = torch.arange(count, device=self.device)[:, None] * length + torch.arange(
            length + 1, device=self.device
        )
        rows = self.documents.ids[-len(self.held_out) :][index] if seen else self.held_out[index]
        return mean_loss(
            self.model, rows, self.positions[length], dtype=self.dtype, quantised=quantised
        )

    def loss(self, rows: Tensor, length: int, *, quantised: bool) -> tuple[Tensor, Tensor]:
        """Return the loss to descend and the plain cross-entropy of rows [B, T + 1]."""
        x, balance = self.model.states(
            rows[:, :-1],
            self.positions[length],
            dtype=self.dtype,
            quantised=quantised,
            dropout=self.recipe.dropout,
        )
        plain = self.model.losses(x, rows[:, 1:].long()).mean()
        return plain + self.recipe.balance * balance, plain

    def compile_ahead(self) -> None:
        """Compile every shape the run will need, so that its clock measures training only."""
        start = time.monotonic()
        shapes = [(self.recipe.long_length, True)]
        if self.recipe.long_from > 0:
            shapes.insert(0, (self.recipe.short_length, False))
        for length, quantised in shapes:
            rows = self.documents.epoch(length, self.generator)[
                : self.recipe.tokens_per_step // length
            ]
            self.loss(rows, length, quantised=quantised)[0].backward()
            self.evaluate(length, quantised=quantised)
            print(f"compiled length {length} after {time.monotonic() - start:.1f} s", flush=True)
        self.model.zero_grad(set_to_none=True)

    def batches(self, length: int) -> list[Tensor]:
        """Return one epoch's batches int32 [B, length + 1]."""
        rows = self.documents.epoch(length, self.generator)
        if self.recall is not None and self.recall.shape[1] == length + 1:
            share = self.recipe.recall_share
            count = round(len(rows) * share / (1 - share))
            order = torch.randperm(len(self.recall), generator=self.generator)[:count]
            rows = torch.cat([rows, self.recall[order.to(self.device)]])
            rows = rows[torch.randperm(len(rows), generator=self.generator).to(self.device)]
        size = max(1, self.recipe.tokens_per_step // length)
        return list(rows.split(size)[: max(1, len(rows) // size)])

    def run(self) -> None:
        """Train until the time limit or the step limit, whichever the progress reaches first."""
        recipe, args = self.recipe, self.args
        if self.device.type == "cuda":
            self.compile_ahead()
        if args.resume and (args.output / STATE_FILE).exists():
            self.restore()
        start, last_eval, saved = time.monotonic() - self.time_s, self.time_s, self.time_s
        while (progress := max(self.time_s / args.time_limit_s, self.step / args.steps)) < 1:
            is_long = progress >= recipe.long_from
            length = recipe.long_length if is_long else recipe.short_length
            if not self.queue or self.queue[-1].shape[1] != length + 1:
                self.queue = self.batches(length)
            quantised = progress >= recipe.quantised_from
            total, plain = self.loss(self.queue.pop(), length, quantised=quantised)
            total.backward()
            self.optimisers.step(recipe.rate(progress))
            self.model.zero_grad(set_to_none=True)
            self.step, self.tokens = self.step + 1, self.tokens + recipe.tokens_per_step
            if self.step % args.log_every == 0:
                # Reading the loss waits for the device: the clock says what was done.
                entry = self.record(progress, plain.item(), time.monotonic() - start)
                if entry["time_s"] - last_eval >= args.evaluate_every_s:
                    last_eval = entry["time_s"]
                    entry["held_out"] = self.evaluate(length, quantised=quantised)
                    save_target(self.model, args.output)
                print(json.dumps(entry), flush=True)
            self.time_s = time.monotonic() - start
            if self.time_s - saved >= args.save_every_s:
                self.save()
                saved = self.time_s = time.monotonic() - start

    def save(self) -> None:
        """Write what `--resume` goes on from; a run that is stopped meanwhile leaves the old."""
        generators = [torch.get_rng_state(), self.generator.get_state()]
        if self.device.type == "cuda":
            generators.append(torch.cuda.get_rng_state())
        state = {
            "model": self.model.state_dict(),
            "optimisers": self.optimisers.state(),
            "generators": generators,
            "queue": self.queue,
            "log": self.log,
            "counts": (self.step, self.tokens, self.time_s),
        }
        self.args.output.mkdir(parents=True, exist_ok=True)
        partial = self.args.output / f"{STATE_FILE}.partial"
        torch.save(state, partial)
        partial.replace(self.args.output / STATE_FILE)

    def restore(self) -> None:
        """Go on from what `save` wrote, to the same bits on a CPU."""
        state = torch.load(self.args.output / STATE_FILE, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.optimisers.load(state["optimisers"])
        first, own, *of_device = [generator.cpu() for generator in state["generators"]]
        torch.set_rng_state(first)
        self.generator.set_state(own)
        for generator in of_device:
            torch.cuda.set_rng_state(generator)
        self.queue, self.log = state["queue"], state["log"]
        self.step, self.tokens, self.time_s = state["counts"]
        print(f"goes on from step {self.step} after {self.time_s:.1f} s", flush=True)

    def record(self, progress: float, loss: float, time_s: float) -> dict[str, float]:
        """Append one line to the log and return it."""
        epochs = self.tokens / len(self.documents.ids)
        entry = {
            "step": self.step,
            "progress": round(progress, 4),
            "time_s": round(time_s, 1),
            "epochs": round(epochs, 2),
        }
        entry |= {"tokens_per_s": round(self.tokens / time_s), "train": round(loss, 4)}
        self.log.append(entry)
        return entry

    def finish(self) -> None:
        """Evaluate, write the model and the log."""
        sizes = json.loads((self.args.corpus / "corpus.json").read_text())["held_out"]
        bits_per_byte = sizes["tokens"] / sizes["bytes"] / np.log(2)
        final = {}
        for length in sorted(self.positions):
            loss = self.evaluate(length, quantised=True)
            seen = self.evaluate(length, quantised=True, seen=True)
            final[f"held_out_{length}"] = {
                "nats_per_token": loss,
                "bits_per_byte": loss * bits_per_byte,
            }
            final[f"seen_{length}"] = {"nats_per_token": seen}
        save_target(self.model, self.args.output)
        log = {"recipe": vars(self.recipe), "log": self.log, "final": final}
        (self.args.output / "training_log.json").write_text(json.dumps(log) + "\n")
        (self.args.output / STATE_FILE).unlink(missing_ok=True)
        print(json.dumps(final), flush=True)


def main() -> None:
    """Read the command line, train, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder that corpus.py wrote")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--time-limit-s", type=float, default=470.0)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--evaluate-every-s", type=float, default=30.0)
    parser.add_argument(
        "--held-out-sequences", type=int, default=10**6, help="of 1024 tokens; fewer is quicker"
    )
    parser.add_argument("--initial", type=Path, help="a written target to go on from")
    parser.add_argument("--recall", type=Path, help="train.npy of recall_text.py")
    parser.add_argument("--save-every-s", type=float, default=30.0)
    parser.add_argument("--resume", action="store_true")
    usual = Recipe()
    for name, value in vars(usual).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value))
    args = parser.parse_args()
    values = {name: getattr(args, name) for name in vars(usual) if getattr(args, name) is not None}
    recipe = replace(CONTINUED if args.initial else usual, **values)
    torch._dynamo.config.recompile_limit = 32
    trainer = Trainer(args, recipe)
    trainer.run()
    trainer.finish()


if __name__ == "__main__":
    main()
