"""A host for the interpreter of a plan: admits prompts, runs programs and reads the ring.

It replaces the runtime, and shares only the plan with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch

from specbuild.builder.backends.backend import model_roles
from specbuild.builder.backends.cuda.backend import CUDA
from specbuild.builder.backends.cuda.compile.nvrtc import target_of
from specbuild.builder.backends.cuda.draft_models import draft_parts
from specbuild.builder.backends.cuda.engine import CudaModel, LoweredEngine, lower_engine
from specbuild.builder.backends.cuda.lowering import CUDA_PASSES, shard_pass
from specbuild.builder.backends.cuda.plan.interpret import PlanInterpreter
from specbuild.builder.backends.cuda.plan.plan_writer import Lower
from specbuild.builder.engine.sizes import EngineSizes
from specbuild.builder.graph.passes.pipeline import run_passes
from specbuild.builder.graph.passes.weights import Recipe
from specbuild.builder.graphs import export_graphs
from specbuild.builder.inputs import read_checkpoints, settled_inputs
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.cache.layout import KvLayout
from specbuild.runtime.draft.draft_models import model_of
from specbuild.runtime.engine_dir.cache_groups import pages_per_sequence
from specbuild.runtime.engine_dir.drafters.registry import DRAFT_GROUPS
from specbuild.runtime.engine_dir.manifest import CacheGroup, DraftShape
from specbuild.runtime.engine_dir.plan import CompiledKernel, ProgramEntry, draft_write_slot

RING_ENTRIES = 64


Drafts: TypeAlias = Path | tuple[Path, ...] | None


def fused_engine(model: Path, draft: Drafts, **options: Any) -> tuple[CudaModel, EngineSizes]:
    """Return the fused graphs of these checkpoints, and the engine's sizes."""
    asked = BuildOptions.from_flat(
        model=model, draft=draft, output=Path("unused"), backend="cuda", **options
    )
    silent = SilentProgress()
    inputs = settled_inputs(asked, CUDA, read_checkpoints(asked, silent))
    sources, engine_sizes = inputs.sources, inputs.engine_sizes
    exported = export_graphs(sources, engine_sizes, silent)
    models = {role: exported[role] for role in model_roles(sources)}
    for role, graph in models.items():
        shard = (
            [shard_pass(engine_sizes.ranks)] if engine_sizes.ranks > 1 and role == "target" else []
        )
        run_passes(role, graph, [*CUDA_PASSES, *shard], None)
    return CudaModel(models, sources.target_geometry, draft_parts(sources)), engine_sizes


def lowered_engine(
    model: Path, draft: Drafts, lower: Lower | None = None, **options: Any
) -> LoweredEngine:
    """Return the programs of a CUDA engine of these checkpoints; compile nothing."""
    return lower_engine(*fused_engine(model, draft, **options), target_of("sm_90a"), lower)


@dataclass
class Step:
    """The results of one step for a sequence."""

    tokens: list[int]
    logprobs: list[float]
    accepted: int


@cache
def stored(recipe: Recipe) -> torch.Tensor:
    """Return a stored tensor. It is made once for all hosts, since no op writes to it."""
    return recipe.checked()


class PlanHost:
    """The rows of sequences on an interpreted engine."""

    def __init__(self, engine: LoweredEngine) -> None:
        self.engine = engine
        writer = engine.writer
        unbuilt = {
            k: CompiledKernel(f"{k.folder}:{k.entry}", "", k.entry, 0, 0, 0) for k in writer.kernels
        }
        entries = [entry for entry, _ in engine.programs]
        self.plan = writer.plan(engine.target, 0, unbuilt, entries)
        weights = engine.weights
        self.memory = PlanInterpreter(self.plan, lambda name: stored(weights[name]))
        self.port("done").fill_(1)
        self._next_page = {group.name: 1 for group in engine.engine_sizes.groups}
        self._programs: dict[str, Any] = {}

    def port(self, name: str) -> torch.Tensor:
        """Return a port's tensor in the engine's memory."""
        return self.memory.port(name)

    def run(self, name: str) -> None:
        """Run a program by name."""
        if name not in self._programs:
            lowered = next(low for entry, low in self.engine.programs if entry.name == name)
            self._programs[name] = self.engine.writer.program(lowered)
        self.memory.run(self._programs[name])

    def entry(self, name: str) -> ProgramEntry:
        """Return the plan's entry of a program."""
        return next(entry for entry in self.plan.programs if entry.name == name)

    def give_pages(self, row: int) -> None:
        """Allocate all pages of a sequence. The table of a group with a window is a ring."""
        limits = self.engine.engine_sizes.limits
        for group in self.engine.engine_sizes.groups:
            held = pages_per_sequence(
                group.name, limits, tokens=limits.max_seq_len,
                page_size=group.page_size, window=group.window,
            )  # fmt: skip
            first = self._next_page[group.name]
            self._next_page[group.name] += held
            assert first + held <= group.pages
            table = self.port(f"page_table.{group.name}")
            count = KvLayout(group).logical_pages(limits)
            table[row] = first + torch.arange(count, dtype=torch.int32) % held
        if self.engine.parts.states is not None:
            self.port("state_slot")[row] = row

    def write_slots(self, group: CacheGroup, row: int, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots of these positions of a sequence in the group's pools."""
        table = self.port(f"page_table.{group.name}")[row]
        size = group.page_size
        return table[positions.long() // size] * size + positions % size

    def feed(self, row: int, ids: list[int], start: int) -> None:
        """Write the ports of a prefill: a sequence's ``ids`` from position ``start`` on."""
        count = len(ids)
        positions = torch.arange(start, start + count, dtype=torch.int32)
        for name in ("token_ids", "positions", "row_slot", "ancestor_bits"):
            self.port(f"prefill.{name}").zero_()
        self.port("prefill.token_ids")[:count] = torch.tensor(ids, dtype=torch.int32)
        self.port("prefill.positions")[:count] = positions
        self.port("prefill.row_slot")[:count] = positions
        row_start = self.port("prefill.row_start")
        row_start[: row + 1], row_start[row + 1 :] = 0, count
        self.port("prefill.tree_start").zero_()[row] = start + count
        for group in self.engine.engine_sizes.target_groups:
            port = self.port(f"prefill.write_slot.{group.name}")
            port.copy_(torch.arange(len(port)) % group.page_size)
            port[:count] = self.write_slots(group, row, positions)

    def admit(
        self, row: int, ids: list[int], budget: int, *, temperature: float = 0.0, seed: int = 0
    ) -> tuple[int, float]:
        """Run the prompt and prepare the row for steps; return its first token and logprob."""
        self.give_pages(row)
        sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "seed": seed}
        rows = min(e.rows for e in self.plan.programs if e.kind == "prefill")
        drafts = [group for group in self.engine.engine_sizes.groups if group.name in DRAFT_GROUPS]
        for start in range(0, len(ids), rows):
            chunk = ids[start : start + rows]
            self.feed(row, chunk, start)
            for name, value in sampling.items():
                self.port(f"prefill.{name}").zero_()[row] = value
            self.port("prefill.position").zero_()[row] = start + len(chunk) - 1
            self.port("prefill.logit_rows").zero_()[row] = len(chunk) - 1
            for draft in drafts:
                self._feed_draft(draft, row, ids, start, len(chunk))
            self.run(f"prefill@{rows}")
        choice = int(self.port("prefill.choice")[row])
        state = {"length": len(ids), "root": choice, "limit": len(ids) + budget, "done": 0}
        for name, value in {**state, **sampling}.items():
            self.port(name)[row] = value
        if drafts:
            self.port("pending_captured")[row, 0] = self.port("prefill.last_captured")[row]
            self.port("pending_tokens")[row, 0] = choice
            self.port("pending_count")[row] = 1
        return choice, float(self.port("prefill.logprob")[row])

    def _feed_draft(
        self, draft: CacheGroup, row: int, ids: list[int], start: int, count: int
    ) -> None:
        """Write the draft's ports: row t gets token t + 1, which the last row does not have yet."""
        known = min(count, len(ids) - 1 - start)
        positions = torch.arange(start, start + known, dtype=torch.int32)
        port = self.port("prefill.draft_token_ids").zero_()
        port[:known] = torch.tensor(ids[start + 1 : start + 1 + known], dtype=torch.int32)
        slots = self.port(f"prefill.{draft_write_slot(draft.name)}")
        slots.copy_(torch.arange(len(slots)) % draft.page_size)
        slots[:known] = self.write_slots(draft, row, positions)

    def step(self, program: str) -> list[Step]:
        """Run a step and return the ring's results by row."""
        before = int(self.port("step")[0])
        self.run(program)
        place = before % RING_ENTRIES
        assert int(self.port("ring.step")[place]) == before + 1
        steps = []
        for row in range(self.entry(program).batch):
            count = int(self.port("ring.count")[place, row])
            steps.append(
                Step(
                    self.port("ring.tokens")[place, row, :count].tolist(),
                    self.port("ring.logprobs")[place, row, :count].tolist(),
                    int(self.port("ring.accepted")[place, row]),
                )
            )
        return steps

    def generate(self, row: int, program: str, tokens: int) -> list[int]:
        """Return at least this many tokens of one sequence, or all, by steps of a program."""
        out: list[int] = []
        while len(out) < tokens and not self.port("done")[row]:
            out += self.step(program)[row].tokens
        return out

    def score(self, row: int, ids: list[int], start: int = 0) -> torch.Tensor:
        """Return logits [len(ids), V] of a sequence from position ``start`` on; at most 64 rows."""
        rows = next(e.rows for e in self.plan.programs if e.kind == "score" and e.rows >= len(ids))
        self.feed(row, ids, start)
        logit_rows = self.port("score.logit_rows").zero_()
        logit_rows[: len(ids)] = torch.arange(len(ids))
        self.run(f"score@{rows}")
        return self.port("score.logits")[: len(ids)].clone()


def step_name(batch: int, shape: DraftShape | None = None, *, full_logits: bool = False) -> str:
    """Return the name of a step program."""
    draft = ""
    if shape is not None:
        sizes = f"{shape.draft_top_k}-{shape.draft_depth}-{shape.draft_tokens}"
        draft = f".{model_of(shape) or 'draft'}-{sizes}"
    return f"step@{batch}{draft}{'.logits' if full_logits else ''}"
