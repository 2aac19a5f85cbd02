"""What every training of new heads does around its steps: read, estimate, train, judge, write."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from specbuild.builder.checkpoint.target_parts import TargetCheckpoint
from specbuild.builder.progress import Progress, SilentProgress
from specbuild.builder.training.corpus import Rows
from specbuild.builder.training.frozen_target import load_target
from specbuild.builder.training.heads.backbone import Backbone
from specbuild.builder.training.heads.estimate import TrainingEstimate, estimate_training
from specbuild.builder.training.heads.options import HeadOptions
from specbuild.builder.training.heads.output import HeadReport, write_head_report
from specbuild.builder.training.heads.run import HeadRun, leave, restore, train, trial
from specbuild.builder.training.heads.stage import Schedule
from specbuild.builder.training.heads.workers import Workers
from specbuild.builder.training.run_state import INITIAL_FILE, RunFolder
from specbuild.builder.training.training_text import read_training_text
from specbuild.runtime.errors import SpecbuildError

# What does not change the result of a run, and may differ when it is resumed.
FREE_OPTIONS = ("output", "save_every", "resume", "finish", "time_limit_s")
UNREPORTED_OPTIONS = (*FREE_OPTIONS, "model", "texts", "held_out", "initial", "device")


Measure = Callable[..., float]


@dataclass(frozen=True)
class Judge:
    """Perplexities to measure before training and after it, by name.

    Both get a function that measures held-out text with (``heads=True``) or without the new heads.
    """

    before: Callable[[Measure], dict[str, float]]
    after: Callable[[Measure], dict[str, float]]


def require_hidden_layers(options: HeadOptions, target: TargetCheckpoint) -> None:
    """SpecbuildError where ``--hidden-layers`` names one that the model has not."""
    count = len(target.geometry.layer_types)
    for layer in options.hidden_layers or ():
        if not 0 <= layer < count:
            raise SpecbuildError(
                f"--hidden-layers: {layer} is no layer of the model, expected 0 to {count - 1}"
            )


@dataclass(frozen=True)
class Session:
    """One run's folder, processes and progress."""

    options: HeadOptions
    folder: RunFolder
    workers: Workers
    progress: Progress

    @classmethod
    @contextmanager
    def begun(cls, options: HeadOptions, progress: Progress) -> Iterator[Session]:
        """Joins the other processes and opens the run's folder; a refused run leaves nothing."""
        workers = Workers.joined(options.device)
        # Processes meet in every layer of every pass: all run as many.
        if options.batch_size % workers.count:
            raise SpecbuildError(
                f"train: a batch of {options.batch_size} sequences for {workers.count} processes; "
                "give each as many, with a --batch-size that is a multiple"
            )
        values = {k: v for k, v in asdict(options).items() if k not in FREE_OPTIONS}
        values["processes"] = workers.count  # sums come out differently in the last bits
        text = json.dumps(values, default=str, sort_keys=True)
        fingerprint = hashlib.sha256(text.encode()).hexdigest()
        if workers.leads:
            folder = RunFolder.open(options.output, fingerprint=fingerprint, resume=options.resume)
        workers.wait()
        if not workers.leads:
            folder = RunFolder.of(options.output)
        try:
            yield cls(options, folder, workers, progress if workers.leads else SilentProgress())
        except SpecbuildError:
            if workers.leads:
                folder.remove_unused(INITIAL_FILE)
            raise
        finally:
            if workers.leads:
                folder.remove_unused()
            workers.leave()

    def backbone(self, *, checkpointing: bool) -> Backbone:
        """The model, frozen, on this process's device."""
        options = self.options
        model = load_target(options.model, device=self.workers.device, dtype=options.dtype)
        return Backbone(model, checkpointing=checkpointing)

    def trained(
        self,
        backbone: Backbone,
        schedule: Schedule,
        judge: Judge,
        write: Callable[[Path], None],
        started_s: float,
    ) -> HeadReport:
        """Plans, trains, judges, and publishes what ``write`` puts in a folder."""
        options, workers = self.options, self.workers
        text, held_out = read_training_text(self.options, backbone.model)
        own = [p for stage in schedule.stages for p in stage.heads.parameters()]
        workers.shard(backbone.layers, own)
        run = HeadRun(options, backbone, schedule, text, workers, self.progress)
        size = options.micro_batch_size or options.batch_size

        def measure(*, heads: bool) -> float:
            return perplexity(backbone, held_out, heads=heads, batch_size=size)

        found = judge.before(measure) if len(held_out.ids) else {}
        estimate = self._estimate(run, own)
        restore(run, self.folder.load())
        finished = train(run, self.folder, started_s)
        leave(run)
        if finished and found:
            found |= judge.after(measure)
        report = HeadReport(
            finished=finished,
            steps=run.step,
            plan=estimate,
            training_tokens=len(text.stream.ids),
            held_out_tokens=held_out.ids[:, 1:].size,
            perplexities=found,
            losses=tuple(run.points),
            options={k: v for k, v in asdict(options).items() if k not in UNREPORTED_OPTIONS},
        )
        if finished and workers.leads:

            def write_all(folder: Path) -> None:
                write(folder)
                write_head_report(folder, report)

            self.folder.publish(write_all, options.output)
            for name, value in found.items():
                self.progress.note(f"perplexity, {name}: {value:.4f}")
            self.progress.note(f"the tensors in {options.output} go beside the model, for build")
        return report

    def _estimate(self, run: HeadRun, own: list[nn.Parameter]) -> TrainingEstimate:
        options = self.options
        steps = run.schedule.steps
        estimate = estimate_training(
            run.backbone.model,
            own,
            processes=self.workers.count,
            tokens=steps * options.batch_size * options.sequence_length,
            steps=steps,
            trial=trial(run),
        )
        for line in estimate.lines():
            self.progress.note(line)
        return estimate


@torch.no_grad()
def perplexity(backbone: Backbone, rows: Rows, *, heads: bool, batch_size: int) -> float:
    """``exp`` of the mean cost of the rows' next tokens, each row read alone."""
    device = str(backbone.head.weight.device)
    costs = []
    for start in range(0, len(rows.ids), batch_size):
        ids = rows.batch(slice(start, start + batch_size), device).ids
        with backbone.switch.turned(heads):
            states = backbone.run(ids).last[:, :-1]
        for row, wanted in zip(states, ids[:, 1:], strict=True):
            logits = backbone.head(row).float()
            costs.append(F.cross_entropy(logits, wanted, reduction="none").double())
    return float(torch.cat(costs).mean().exp())
