"""Builds the programs of an engine: prompt chunks, decode steps with and without draft, scoring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specbuild.builder.backends.cuda.step.draft import Drafting
from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.host_proposals import host_chains, write_accepted
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor
from specbuild.builder.backends.cuda.step.logit_processors import advanced_state, choose_processed
from specbuild.builder.backends.cuda.step.recurrent_states import save_path
from specbuild.builder.backends.cuda.step.state import SCORE_LOGIT_ROWS
from specbuild.builder.backends.cuda.step.target import (
    SAMPLING,
    TargetRows,
    WrittenLogits,
    choose,
    logits,
    run_target,
)
from specbuild.builder.backends.cuda.step.verification import (
    accept,
    row_counts,
    row_sampling,
    verify_rows,
)
from specbuild.builder.backends.cuda.step.views import (
    advance_views,
    count_agreement,
    sample_rows,
    tree_features,
    view_rows,
)
from specbuild.builder.engine.backend_sizes import MAX_DECODE_ROWS
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry
from specbuild.runtime.engine_dir.manifest import DraftShape, Limits
from specbuild.runtime.engine_dir.plan import (
    ACCEPT,
    CHECK_BUDGET,
    LIST_BUDGET,
    TOP_PATH,
    draft_write_slot,
)

PREFILL_ROWS = (64, 256, 512, 1024, 2048, 4096, 8192)
SCORE_ROWS = (8, 64, 256)
MAX_CHAIN = 4
NO_DRAFT = DraftShape(0, 0, 0)
_ROW_PORTS = ("token_ids", "positions", "row_start", "row_slot", "tree_start", "ancestor_bits")


def batch_buckets(max_batch_size: int) -> tuple[int, ...]:
    """Return powers of two up to the first that is at least ``max_batch_size``."""
    return tuple(1 << i for i in range((max_batch_size - 1).bit_length() + 1))


def draft_shapes(largest: Limits | DraftShape) -> tuple[DraftShape, ...]:
    """Return the shapes with steps: short chains, and the requested tree or chain."""
    max_chain = min(largest.draft_depth, largest.draft_tokens, MAX_CHAIN)
    shapes = [DraftShape(1, depth, depth) for depth in range(1, max_chain + 1)]
    requested = DraftShape(largest.draft_top_k, largest.draft_depth, largest.draft_tokens)
    if requested not in (NO_DRAFT, *shapes):
        shapes.append(requested)
    return tuple(shapes)


def deepest(shapes: tuple[DraftShape, ...]) -> int:
    """Return the maximum number of draft tokens that a step can accept; 0 without a draft."""
    return max((shape.draft_depth for shape in shapes), default=0)


def fits(batch: int, shape: DraftShape, depth: int, draft: DraftGeometry | None = None) -> bool:
    """Return whether every launch of a step stays batch-invariant.

    ``depth`` is that of the deepest draft. Mask rows follow the rows that the draft ingests; a
    block has a separate launch.
    """
    rows = [shape.draft_tokens + 1]
    if shape.draft_depth:
        masks = 0 if draft is None else draft.mask_rows(shape.draft_depth)
        block = 0 if draft is None else draft.block_rows(shape.draft_depth)
        rows += [depth + 1 + masks, shape.draft_top_k, block]
    return batch * max(rows) <= MAX_DECODE_ROWS


@dataclass(frozen=True)
class StepForm:
    """A kind of decode step for ``batch`` sequences; see also ``ProgramEntry``.

    ``capacity`` is the number of re-verified rows (SpecPV). Rows of a ``sparse`` step attend to
    the tokens that indexers select (DSA). A step that ``checks`` also compares this with full
    attention. A ``host_proposal`` step verifies chains from the host. ``drafter`` is the name in
    ``EngineParts.drafts`` of the draft model that drafts, if any. ``ragged_rows`` is the target's
    number of rows in a step in which the host sets the number of rows per sequence.
    """

    batch: int
    shape: DraftShape
    logits: WrittenLogits = "none"
    extends: bool = False
    capacity: int = 0
    sparse: bool = False
    checks: bool = False
    host_proposal: bool = False
    drafter: str = ""
    ragged_rows: int = 0

    @property
    def rows(self) -> int:
        """The number of rows of the target."""
        if self.ragged_rows:
            return self.ragged_rows
        return self.batch * (self.shape.draft_tokens + 1) + self.capacity

    @property
    def name(self) -> str:
        """The name: ``step@4``, ``step@4.extends`` or ``step@1.draft-1-3-3`` (K, D, N).

        Then follow ``.refresh-64`` with capacity, ``.sparse`` or ``.checked``, ``.rows-16`` if
        ragged, and ``.logits`` if all are written. One of several drafts has its kind instead of
        ``draft``. A step for host proposals is ``step@4.offered-7``.
        """
        shape = self.shape
        if self.host_proposal:
            return f"step@{self.batch}.offered-{shape.draft_tokens}{self._suffix}"
        sizes = f"{shape.draft_top_k}-{shape.draft_depth}-{shape.draft_tokens}"
        draft = f".{self.drafter or 'draft'}-{sizes}" if shape.draft_depth else ""
        name = f"step@{self.batch}{draft}"
        name = f"{name}{'.extends' if self.extends else ''}"
        name = f"{name}{f'.refresh-{self.capacity}' if self.capacity else ''}"
        if self.sparse:
            name = f"{name}.{'checked' if self.checks else 'sparse'}"
        return f"{name}{self._suffix}"

    @property
    def _suffix(self) -> str:
        rows = f".rows-{self.ragged_rows}" if self.ragged_rows else ""
        return f"{rows}{'.logits' if self.logits == 'all' else ''}"


def step_program(parts: EngineParts, form: StepForm) -> ProgramIr:
    """Return the program of one decode step."""
    batch, shape, capacity = form.batch, form.shape, form.capacity
    program = ProgramIr(form.name, "refresh" if capacity else "decode")
    tree = _tree(parts, program, form)
    is_ragged = form.ragged_rows > 0
    counts = row_counts(parts, batch, host_proposal=form.host_proposal) if is_ragged else None
    trees = rows = verify_rows(
        parts, program, batch, tree, state=counts, ragged_rows=form.ragged_rows
    )
    view_inputs: dict[str, Tensor] = {}
    sampling = row_sampling(trees.inputs)
    if parts.views is not None:
        rows, view_inputs = view_rows(parts, program, trees.inputs, batch, capacity)
    sparse_pass: dict[str, Tensor] = {}
    if form.checks:
        # The full pass that follows overwrites this pass's keys and values. The step uses the
        # result of the full pass.
        sparse = replace(rows, budget=parts.ports.first(CHECK_BUDGET, batch))
        sparse_target = run_target(parts, program, sparse, bare=True)
        assert sparse_target.violations is not None
        sparse_pass = {
            **choose(sparse_target.placement, sampling, form.logits),
            "violations": sparse_target.violations,
        }
        if tree is not None:
            sparse_pass = {**sparse_pass, **accept(program, trees, tree, sparse_pass, shape)}
    if capacity:
        rows, sampling = sample_rows(program, rows, trees.inputs, view_inputs, capacity)
    if form.sparse:
        rows = replace(rows, budget=parts.ports.first(LIST_BUDGET, batch))
    target = run_target(parts, program, rows)
    aux_hidden = target.aux_hidden
    if aux_hidden is not None and capacity:
        aux_hidden = tree_features(program, aux_hidden, view_inputs)
    applies_processors = form.logits == "all" and parts.ports.sizes.has_processors
    chosen = (
        choose_processed(parts, program, logits(target.placement), sampling, rows=trees)
        if applies_processors
        else choose(target.placement, sampling, form.logits)
    )
    program.section = ACCEPT
    if capacity:
        count_agreement(parts, program, chosen["choice"], sampling, view_inputs["fed_again"])
        # The rows of trees come first.
        chosen = {name: chosen[name].view(trees.rows) for name in ("choice", "logprob")}
    top_path = parts.ports[TOP_PATH] if applies_processors else None
    path = {} if tree is None else accept(program, trees, tree, chosen, shape, path=top_path)
    save_path(parts, program, batch, trees.inputs, path)
    if form.host_proposal and tree is not None and aux_hidden is not None:
        write_accepted(parts, program, trees, tree, {**chosen, **path}, aux_hidden=aux_hidden)
    if shape.draft_top_k > 1:
        _commit(parts, program, batch, path["path"])
    if target.violations is not None:
        program.call(
            "DsaTally", {"violations": target.violations, **parts.state("DsaTally", batch)}
        )
    if sparse_pass:
        _compare(parts, program, batch, sparse_pass, {**chosen, **path})
    program.call(
        "Advance",
        {
            **chosen,
            "path": path.get("path"),
            "accepted": path.get("accepted"),
            "captured": aux_hidden,
            **advanced_state(parts, batch, marks=applies_processors),
            "row_start": trees.inputs["row_start"] if is_ragged else None,
        },
        {"extended": int(tree is not None or form.extends)},
    )
    if parts.views is not None:
        advance_views(parts, program, trees.inputs, view_inputs, path.get("path"), batch)
    return program


def _tree(parts: EngineParts, program: ProgramIr, form: StepForm) -> dict[str, Tensor] | None:
    """Add the drafting and return the tree that the step verifies; drafts ingest pending rows."""
    drafts = form.shape.draft_depth > 0 and not form.host_proposal
    drafting = {
        name: Drafting(parts, draft, program, form.batch, form.shape)
        for name, draft in parts.drafts.items()
    }
    if drafts or form.extends or form.host_proposal:
        for name, other in drafting.items():
            # All drafts ingest the rows, so that any of them can draft in the next step.
            if not (drafts and name == form.drafter):
                other.ingest()
    if form.host_proposal:
        return host_chains(parts, form.batch, form.shape.draft_tokens)
    return drafting[form.drafter].tree() if drafts else None


def _compare(
    parts: EngineParts,
    program: ProgramIr,
    batch: int,
    sparse_pass: Mapping[str, Tensor],
    full_pass: Mapping[str, Tensor],
) -> None:
    """Report the choices of the sparse pass and the full pass to the host."""
    program.call(
        "DsaCompare",
        {
            "sampled": sparse_pass["choice"],
            "choice": full_pass["choice"],
            "path": full_pass.get("path"),
            "accepted": full_pass.get("accepted"),
            "sampled_accepted": sparse_pass.get("accepted"),
            "violations": sparse_pass["violations"],
            **parts.state("DsaCompare", batch),
        },
    )


def _commit(parts: EngineParts, program: ProgramIr, batch: int, path: Tensor) -> None:
    """Move the accepted nodes' keys and values to the committed slots. Chains are in place."""
    for group in parts.target_groups:
        for pools in parts.stacks(group):
            program.call(
                "PathCommit",
                {
                    "pools": pools,
                    "path": path,
                    **parts.state("PathCommit", batch),
                    "page_table": parts.page_table(group, batch),
                },
            )


def prefill_program(parts: EngineParts, rows: int) -> ProgramIr:
    """Return the program of a prompt chunk; drafts write only keys and values of the same rows."""
    program = ProgramIr(f"prefill@{rows}", "prefill")
    batch = parts.ports.sizes.batch
    prompts = _host_rows(parts, rows, "prefill.logit_rows")
    target = run_target(parts, program, prompts)
    save_path(parts, program, batch, prompts.inputs, None)
    stored = ("choice", "logprob", *(("logits",) if parts.ports.sizes.has_processors else ()))
    choose(
        target.placement,
        {name: parts.ports[f"prefill.{name}"] for name in SAMPLING},
        "all",
        outputs={name: parts.ports[f"prefill.{name}"] for name in stored},
    )
    if target.aux_hidden is None:
        return program
    program.call(
        "Embed",
        {"token_ids": parts.ports["prefill.logit_rows"], "table": target.aux_hidden},
        outputs={"x": parts.ports["prefill.last_captured"]},
    )
    host_rows = _host_rows(parts, rows, "prefill.logit_rows").inputs
    tokens = parts.ports.first("prefill.draft_token_ids", rows)
    for draft in parts.drafts.values():
        slots = parts.ports.first(f"prefill.{draft_write_slot(draft.group)}", rows)
        draft_rows = {**host_rows, "token_ids": tokens, "write_slot": slots}
        inputs = draft.inputs(draft_rows, parts.page_table(draft.group, batch))
        draft.step.write_rows(parts, draft, program, target.aux_hidden, inputs)
    return program


def score_program(parts: EngineParts, rows: int) -> ProgramIr:
    """Return the program that scores rows with the decode kernels: all logits, no choice."""
    program = ProgramIr(f"score@{rows}", "decode")
    host_rows = _host_rows(parts, rows, "score.logit_rows", min(rows, SCORE_LOGIT_ROWS))
    aux_hidden = None
    if parts.ports.sizes.aux_width:
        aux_hidden = parts.ports.first("score.captured", rows)
    target = run_target(parts, program, host_rows, aux_hidden)
    output = parts.ports.first("score.logits", host_rows.logit_rows)
    logits(target.placement, {"logits": output})
    save_path(parts, program, host_rows.batch, host_rows.inputs, None)
    return program


def _host_rows(
    parts: EngineParts, rows: int, logit_port: str, logit_rows: int | None = None
) -> TargetRows:
    """Return the rows of the prefill ports, for the maximum number of sequences."""
    batch, ports = parts.ports.sizes.batch, parts.ports
    per_row = ("token_ids", "positions", "row_slot", "ancestor_bits")
    inputs = {
        name: ports.first(f"prefill.{name}", rows) if name in per_row else ports[f"prefill.{name}"]
        for name in _ROW_PORTS
    }
    inputs["logit_rows"] = ports.first(logit_port, logit_rows or ports[logit_port].shape[0])
    slots = {
        group: ports.first(f"prefill.write_slot.{group}", rows) for group in parts.target_groups
    }
    return TargetRows(batch, rows, inputs, slots, stores=True)
