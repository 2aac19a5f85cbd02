"""The programs of an engine: prompt chunks, decoding steps with and without a draft, scoring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specbuild.builder.backends.cuda.step.draft import Drafting
from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor
from specbuild.builder.backends.cuda.step.logit_processors import advanced_state, choose_processed
from specbuild.builder.backends.cuda.step.offered import keep_accepted, offered_chains
from specbuild.builder.backends.cuda.step.state import SCORE_LOGIT_ROWS
from specbuild.builder.backends.cuda.step.states import keep_path
from specbuild.builder.backends.cuda.step.target import (
    SAMPLING,
    KeptLogits,
    TargetRows,
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
    """Powers of two; the last holds ``max_batch_size`` sequences."""
    return tuple(1 << i for i in range((max_batch_size - 1).bit_length() + 1))


def draft_shapes(largest: Limits | DraftShape) -> tuple[DraftShape, ...]:
    """What steps are built for: short chains, and the tree or chain that was asked for."""
    chains = min(largest.draft_depth, largest.draft_tokens, MAX_CHAIN)
    shapes = [DraftShape(1, depth, depth) for depth in range(1, chains + 1)]
    built = DraftShape(largest.draft_top_k, largest.draft_depth, largest.draft_tokens)
    if built not in (NO_DRAFT, *shapes):
        shapes.append(built)
    return tuple(shapes)


def deepest(shapes: tuple[DraftShape, ...]) -> int:
    """Most drafts that a step can accept; 0 without a draft."""
    return max((shape.draft_depth for shape in shapes), default=0)


def fits(batch: int, shape: DraftShape, depth: int, draft: DraftGeometry | None = None) -> bool:
    """Whether every launch of a step stays batch-invariant; ``depth`` is the deepest draft's.

    The draft's mask rows follow those that it ingests; a block has a launch of its own.
    """
    rows = [shape.draft_tokens + 1]
    if shape.draft_depth:
        masks = 0 if draft is None else draft.mask_rows(shape.draft_depth)
        block = 0 if draft is None else draft.block_rows(shape.draft_depth)
        rows += [depth + 1 + masks, shape.draft_top_k, block]
    return batch * max(rows) <= MAX_DECODE_ROWS


@dataclass(frozen=True)
class StepForm:
    """What a decoding step of ``batch`` sequences does; ``ProgramEntry`` says more of each field.

    ``capacity`` is for re-verified rows (SpecPV). Rows of a ``sparse`` step attend to what
    indexers choose (DSA); one that ``checks`` is sparse too and holds it against attention to
    everything. An ``offered`` step verifies chains of the host's. ``drafter`` is what
    ``EngineParts.drafts`` calls the draft model that drafts, if one does. With ``ragged_rows`` the
    target has so many rows, of which each sequence has as many as the host says.
    """

    batch: int
    shape: DraftShape
    logits: KeptLogits = "none"
    extends: bool = False
    capacity: int = 0
    sparse: bool = False
    checks: bool = False
    offered: bool = False
    drafter: str = ""
    ragged_rows: int = 0

    @property
    def rows(self) -> int:
        """Of the target."""
        if self.ragged_rows:
            return self.ragged_rows
        return self.batch * (self.shape.draft_tokens + 1) + self.capacity

    @property
    def name(self) -> str:
        """``step@4``, ``step@4.extends``, ``step@1.draft-1-3-3`` (K, D, N), then ``.refresh-64``
        with capacity, ``.sparse`` or ``.checked``, and ``.logits`` if all are written. One of
        several drafts has its name: ``step@1.eagle3-1-3-3``. ``step@4.offered-7``, and that. Ragged
        ones end with their rows: ``step@4.draft-1-4-4.rows-16``."""
        shape = self.shape
        if self.offered:
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
    """One decoding step."""
    batch, shape, capacity = form.batch, form.shape, form.capacity
    program = ProgramIr(form.name, "refresh" if capacity else "decode")
    tree = _tree(parts, program, form)
    is_ragged = form.ragged_rows > 0
    counts = row_counts(parts, batch, offered=form.offered) if is_ragged else None
    trees = rows = verify_rows(
        parts, program, batch, tree, state=counts, ragged_rows=form.ragged_rows
    )
    placed: dict[str, Tensor] = {}
    sampling = row_sampling(trees.inputs)
    if parts.views is not None:
        rows, placed = view_rows(parts, program, trees.inputs, batch, capacity)
    sparse_pass: dict[str, Tensor] = {}
    if form.checks:
        # Its keys and values give way to those of the pass behind it, which counts.
        sparse = replace(rows, budget=parts.ports.first(CHECK_BUDGET, batch))
        found = run_target(parts, program, sparse, bare=True)
        assert found.violations is not None
        sparse_pass = {
            **choose(found.placement, sampling, form.logits),
            "violations": found.violations,
        }
        if tree is not None:
            sparse_pass = {**sparse_pass, **accept(program, trees, tree, sparse_pass, shape)}
    if capacity:
        rows, sampling = sample_rows(program, rows, trees.inputs, placed, capacity)
    if form.sparse:
        rows = replace(rows, budget=parts.ports.first(LIST_BUDGET, batch))
    target = run_target(parts, program, rows)
    aux_hidden = target.aux_hidden
    if aux_hidden is not None and capacity:
        aux_hidden = tree_features(program, aux_hidden, placed)
    processes = form.logits == "all" and parts.ports.sizes.adjusts
    chosen = (
        choose_processed(parts, program, logits(target.placement), sampling, rows=trees)
        if processes
        else choose(target.placement, sampling, form.logits)
    )
    program.section = ACCEPT
    if capacity:
        count_agreement(parts, program, chosen["choice"], sampling, placed["fed_again"])
        # The trees' rows come first.
        chosen = {name: chosen[name].view(trees.rows) for name in ("choice", "logprob")}
    top_path = parts.ports[TOP_PATH] if processes else None
    path = {} if tree is None else accept(program, trees, tree, chosen, shape, path=top_path)
    keep_path(parts, program, batch, trees.inputs, path)
    if form.offered and tree is not None and aux_hidden is not None:
        keep_accepted(parts, program, trees, tree, {**chosen, **path}, aux_hidden=aux_hidden)
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
            **advanced_state(parts, batch, marks=processes),
            "row_start": trees.inputs["row_start"] if is_ragged else None,
        },
        {"extended": int(tree is not None or form.extends)},
    )
    if parts.views is not None:
        advance_views(parts, program, trees.inputs, placed, path.get("path"), batch)
    return program


def _tree(parts: EngineParts, program: ProgramIr, form: StepForm) -> dict[str, Tensor] | None:
    """What the step verifies below the roots; the draft takes up what waits where it should."""
    drafts = form.shape.draft_depth > 0 and not form.offered
    drafting = {
        name: Drafting(parts, draft, program, form.batch, form.shape)
        for name, draft in parts.drafts.items()
    }
    if drafts or form.extends or form.offered:
        for name, beside in drafting.items():
            # So no draft's cache lacks anything, whichever drafts next.
            if not (drafts and name == form.drafter):
                beside.take_up()
    if form.offered:
        return offered_chains(parts, form.batch, form.shape.draft_tokens)
    return drafting[form.drafter].tree() if drafts else None


def _compare(
    parts: EngineParts,
    program: ProgramIr,
    batch: int,
    sparse_pass: Mapping[str, Tensor],
    counted: Mapping[str, Tensor],
) -> None:
    """What the pass that does not count chose, beside the one that does, goes to the host."""
    program.call(
        "DsaCompare",
        {
            "sampled": sparse_pass["choice"],
            "choice": counted["choice"],
            "path": counted.get("path"),
            "accepted": counted.get("accepted"),
            "sampled_accepted": sparse_pass.get("accepted"),
            "violations": sparse_pass["violations"],
            **parts.state("DsaCompare", batch),
        },
    )


def _commit(parts: EngineParts, program: ProgramIr, batch: int, path: Tensor) -> None:
    """The accepted nodes' keys and values move to the committed slots; a chain's lie there."""
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
    """A chunk of prompts; drafts take up the same rows, keys and values only."""
    program = ProgramIr(f"prefill@{rows}", "prefill")
    batch = parts.ports.sizes.batch
    prompts = _given_rows(parts, rows, "prefill.logit_rows")
    target = run_target(parts, program, prompts)
    keep_path(parts, program, batch, prompts.inputs, None)
    kept = ("choice", "logprob", *(("logits",) if parts.ports.sizes.adjusts else ()))
    choose(
        target.placement,
        {name: parts.ports[f"prefill.{name}"] for name in SAMPLING},
        "all",
        outputs={name: parts.ports[f"prefill.{name}"] for name in kept},
    )
    if target.aux_hidden is None:
        return program
    program.call(
        "Embed",
        {"token_ids": parts.ports["prefill.logit_rows"], "table": target.aux_hidden},
        outputs={"x": parts.ports["prefill.last_captured"]},
    )
    given = _given_rows(parts, rows, "prefill.logit_rows").inputs
    tokens = parts.ports.first("prefill.draft_token_ids", rows)
    for draft in parts.drafts.values():
        slots = parts.ports.first(f"prefill.{draft_write_slot(draft.group)}", rows)
        placed = {**given, "token_ids": tokens, "write_slot": slots}
        inputs = draft.inputs(placed, parts.page_table(draft.group, batch))
        draft.step.keep_rows(parts, draft, program, target.aux_hidden, inputs)
    return program


def score_program(parts: EngineParts, rows: int) -> ProgramIr:
    """Rows that the host gives, through the kernels that decode; all logits, no choice."""
    program = ProgramIr(f"score@{rows}", "decode")
    given = _given_rows(parts, rows, "score.logit_rows", min(rows, SCORE_LOGIT_ROWS))
    aux_hidden = None
    if parts.ports.sizes.aux_width:
        aux_hidden = parts.ports.first("score.captured", rows)
    target = run_target(parts, program, given, aux_hidden)
    wanted = parts.ports.first("score.logits", given.logit_rows)
    logits(target.placement, {"logits": wanted})
    keep_path(parts, program, given.batch, given.inputs, None)
    return program


def _given_rows(
    parts: EngineParts, rows: int, logit_port: str, logit_rows: int | None = None
) -> TargetRows:
    """The rows of the prefill ports, of every sequence that the engine has capacity for."""
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
