"""Several drafts of the target, one after another, from one reading of the text, on one GPU.

`specbuild train draft` runs the target in every step. Here its states are kept in GPU memory (16 GB
for this corpus), so that a step runs the draft alone, and the learning rate falls with the time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.config import LkLoss, TrainOptions
from specbuild.builder.training.corpus import Rows, Stream, TrainingText, cut_rows
from specbuild.builder.training.evaluation import Examiner
from specbuild.builder.training.frozen_target import TeacherOutputs, end_of_text_ids, load_target
from specbuild.builder.training.objective import Batch
from specbuild.builder.training.output import write_json
from specbuild.builder.training.prepare import (
    choose_draft_tokens,
    draft_shape,
    prepare,
    write_trained,
)
from specbuild.builder.training.schedule import LearningRateSchedule
from specbuild.builder.training.self_text import Generation, generate_text, no_rows
from specbuild.builder.training.training_loop import TrainingRun

PROMPT, OWN_LENGTH, LENGTH = 32, 256, 512
HELD_OUT_ROWS, READ_ROWS = 64, 128
JUDGING_S = 3.0
# What differs from the options below. Drafts of EAGLE3's form begin with the one in `draft/`.
DRAFTS: dict[str, dict[str, Any]] = {
    "eagle3": {"learning_rate": 1e-3},
    "eagle3-lk": {"learning_rate": 1e-3, "lk": LkLoss(lk_loss_type="lambda")},
    "p-eagle-1": {"kind": "p-eagle"},
    "p-eagle-2": {"kind": "p-eagle", "layers": 2},
    "p-eagle-2-lk": {"kind": "p-eagle", "layers": 2, "lk": LkLoss(lk_loss_type="lambda")},
    "p-eagle-3": {"kind": "p-eagle", "layers": 3},
    "dflash-4": {
        "kind": "dflash",
        "layers": 4,
        "anchors": 128,
        "initial": None,
        "draft_vocab": None,
    },
}


@dataclass(frozen=True)
class States:
    """Of rows ``ids`` [N, T] the target's ``aux`` states [N, T, 3H] and its last ones [N, T, H].

    The first ``own`` rows are text that the target wrote.
    """

    ids: torch.Tensor
    counted: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor
    own: int

    def lesson(self, step: int, size: int, head: torch.Tensor) -> tuple[Batch, TeacherOutputs]:
        """Rows of a step, half of them the target's own, and what the target says of them."""
        random, half = np.random.default_rng(step), size // 2
        drawn = random.integers(0, self.own, half)
        rest = random.integers(self.own, len(self.ids), size - half)
        rows = torch.from_numpy(np.concatenate([drawn, rest])).to(self.ids.device)
        batch = Batch(self.ids[rows], self.counted[rows])
        return batch, TeacherOutputs(self.aux[rows], self.last[rows] @ head.T)


@torch.no_grad()
def read(run: TrainingRun, rows: Rows, own: int) -> States:
    """Runs the target once over every row; its head is left out."""
    model, target = run.target.model, run.target
    whole = rows.batch(slice(0, len(rows.ids)), run.options.device)
    empty = torch.empty(*whole.ids.shape, model.config.hidden_size, dtype=model.dtype)
    last = empty.to(run.options.device)
    aux = last.repeat(1, 1, len(target.aux_layers))
    head, model.lm_head = model.lm_head, torch.nn.Identity()
    for start in range(0, len(rows.ids), READ_ROWS):
        part = slice(start, start + READ_ROWS)
        taught = target.teach(whole.ids[part])
        aux[part], last[part] = taught.aux_hidden, taught.logits
    model.lm_head = head
    return States(whole.ids, whole.counted, aux, last, own)


def write_own(
    model: Any, texts: Mapping[str, np.ndarray], count: int, stop: tuple[int, ...]
) -> tuple[Rows, np.ndarray]:
    """What the target writes greedily: rows to judge by, ids to train on."""
    random = np.random.default_rng(7)
    pieces = []
    for name, rows in (("held_out", HELD_OUT_ROWS), ("train", count)):
        starts = random.integers(0, len(texts[name]) - PROMPT + 1, rows)
        pieces.append(texts[name][starts[:, None] + np.arange(PROMPT)])
    prompts = torch.from_numpy(np.concatenate(pieces).astype(np.int64))
    wish = Generation(new_tokens=OWN_LENGTH - PROMPT, stop=stop, batch_size=len(prompts))
    ids, lengths = (x.numpy() for x in generate_text(model, prompts, wish, SilentProgress()))
    place = np.arange(OWN_LENGTH)
    counted = (place >= PROMPT - 1) & (place < lengths[:, None] - 1)
    written = [
        row[:n] if row[n - 1] in stop else np.append(row[:n], stop[0])
        for row, n in zip(ids[HELD_OUT_ROWS:], lengths[HELD_OUT_ROWS:], strict=True)
    ]
    judged = Rows(ids[:HELD_OUT_ROWS].astype(np.int32), counted[:HELD_OUT_ROWS])
    return judged, np.concatenate(written).astype(np.int32)


def stream(ids: np.ndarray) -> Stream:
    """Ids of which every prediction counts."""
    return Stream(ids, np.ones(len(ids), dtype=bool))


def train(run: TrainingRun, states: States, seconds: float) -> dict[str, Any]:
    """Steps until the time is over; how many, and the mean losses of the last hundred."""
    options, head, started = run.options, run.target.model.lm_head.weight, time.monotonic()
    pace = LearningRateSchedule(1000, options.learning_rate, options.warmup_fraction)
    while (share := (time.monotonic() - started) / seconds) < 1:
        for group in run.optimiser.param_groups:
            group["lr"] = pace.rate(int(1000 * share))
        with run.autocast():
            batch, teacher = states.lesson(run.step, options.batch_size, head)
            random = torch.Generator().manual_seed(run.step)
            predictions = run.objective.predict(run.draft, batch, teacher, random)
            losses = run.objective.losses(predictions, batch, teacher)
        run.objective.total(losses).backward()
        torch.nn.utils.clip_grad_norm_(run.draft.parameters(), options.gradient_clip)
        run.optimiser.step()
        run.optimiser.zero_grad(set_to_none=True)
        run.recent = [*run.recent[-99:], losses.detach()]
        run.step += 1
        if run.step % 4 == 0:
            losses.cpu()  # waits for the GPU: what is queued would take its time after the end
    return {
        "steps": run.step,
        "seconds": round(seconds, 1),
        "losses": torch.stack(run.recent).mean(0).tolist() if run.recent else [],
    }


class Workshop:
    """The target, its text and its states: what all drafts share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.base = TrainOptions(
            model=args.model,
            output=args.output,
            texts=(args.corpus,),
            device=args.device,
            dtype="bfloat16",
            draft_vocab=3072,
            inner=384,
            sequence_length=LENGTH,
            batch_size=args.batch_size,
            learning_rate=2e-3,
            initial=args.initial,
        )
        self.model = load_target(args.model, device=args.device, dtype="bfloat16")
        files = {name: np.load(args.corpus / f"{name}.npy") for name in ("train", "held_out")}
        texts = {name: ids.astype(np.int32) for name, ids in files.items()}
        stop = end_of_text_ids(self.model)
        held_own, own = write_own(self.model, texts, args.own_rows, stop)
        if args.device == "cuda":
            torch.cuda.empty_cache()  # the cache of what was written is as large as the states
        self.held_out = {
            "held_out_text": cut_rows(stream(texts["held_out"]), LENGTH, HELD_OUT_ROWS),
            "held_out_self_text": held_own,
        }
        self.tokens = np.concatenate([texts["train"], own])
        parts = [cut_rows(stream(own), LENGTH, len(own))]
        parts.append(cut_rows(stream(texts["train"]), LENGTH, args.text_rows))
        rows = Rows(*(np.concatenate([getattr(p, n) for p in parts]) for n in ("ids", "counted")))
        self.states = read(self.prepared(self.base), rows, len(parts[0].ids))

    def prepared(self, options: TrainOptions) -> TrainingRun:
        """A draft before its training."""
        shape = draft_shape(options, self.model)
        draft_tokens = choose_draft_tokens(
            options, self.tokens, shape, self.model.config.vocab_size
        )
        text = TrainingText(stream(self.tokens), no_rows(LENGTH), LENGTH, options.seed)
        return prepare(options, self.model, shape, draft_tokens, text)

    def judged(self, run: TrainingRun) -> dict[str, Any]:
        """Agreement with the target by position, on both kinds of held-out rows."""
        options = run.options
        examiner = Examiner(run.target, run.objective, options.device, 32, run.autocast)
        found = {name: examiner.acceptance(run.draft, rows) for name, rows in self.held_out.items()}
        return {name: asdict(entry) for name, entry in found.items() if entry is not None}

    def make(self, name: str, seconds: float) -> dict[str, Any]:
        """Trains the draft of this name and writes it; what is to tell of it."""
        options = replace(self.base, **DRAFTS[name])
        run = self.prepared(options)
        report = train(run, self.states, seconds) | self.judged(run)
        draft_tokens = choose_draft_tokens(
            options, self.tokens, run.draft.shape, self.model.config.vocab_size
        )
        folder = options.output / name
        folder.mkdir(parents=True, exist_ok=True)
        write_trained(folder, run, draft_tokens, LENGTH)
        return report


def main() -> None:
    """Trains what is asked for, and writes `report.json` after each draft."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--initial", type=Path, required=True, help="the EAGLE3 draft")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of corpus.py")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--draft", nargs="+", required=True, metavar="NAME:WEIGHT")
    parser.add_argument("--seconds", type=float, default=240.0, help="of everything (240)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--own-rows", type=int, default=8192, help="that the target writes")
    parser.add_argument("--text-rows", type=int, default=1_000_000, help="of the corpus at most")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    workshop = Workshop(args)
    report: dict[str, Any] = {"draft/": workshop.judged(workshop.prepared(workshop.base))}
    print(f"{time.monotonic() - started:.0f} s", json.dumps(report), flush=True)
    expected = [(name, float(weight)) for name, weight in (w.split(":") for w in args.draft)]
    for place, (name, weight) in enumerate(expected):
        left = args.seconds - (time.monotonic() - started) - JUDGING_S * (len(expected) - place)
        share = weight / sum(weight for _, weight in expected[place:])
        report[name] = workshop.make(name, max(1.0, left * share))
        write_json(args.output / "report.json", report)
        print(f"{time.monotonic() - started:.0f} s", name, json.dumps(report[name]), flush=True)


if __name__ == "__main__":
    main()
