"""The step programs of an engine: their number, and that each combination has one."""

from __future__ import annotations

from dataclasses import astuple, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from exact_steps import exact_forms

from specbuild.builder.backends.cuda.step.forms import step_forms
from specbuild.builder.backends.cuda.step.host_proposals import host_proposal_sizes
from specbuild.builder.backends.cuda.step.programs import (
    NO_DRAFT,
    StepForm,
    batch_buckets,
    draft_shapes,
)
from specbuild.builder.backends.cuda.step.views import refresh_capacities
from specbuild.builder.engine.backend_sizes import MAX_DECODE_ROWS
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.draft.draft_models import RaggedShape
from specbuild.runtime.draft.draft_models import shape_of as named
from specbuild.runtime.engine_dir.drafters.dflash import DFlashGeometry
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import ProgramEntry
from specbuild.runtime.errors import EngineFileError, RequestError

BUFFER = 64
CHAIN, TREE = DraftShape(1, 4, 4), DraftShape(4, 5, 15)


def parts(
    *, specpv: bool = False, dsa: bool = False, checks: bool = True, prefilter_head: bool = False
) -> Any:
    """Return the parts of an engine that determine its steps."""
    views = SimpleNamespace(config=SimpleNamespace(n_spec_tokens_buf=BUFFER))
    sizes = SimpleNamespace(sparse=dsa, checks=dsa and checks)
    return SimpleNamespace(
        views=views if specpv else None,
        dsa=object() if dsa else None,
        ports=SimpleNamespace(sizes=sizes),
        prefilter_head=prefilter_head,
        drafts={"": SimpleNamespace(geometry=None)},
        states=None,
    )


def by_draft(shapes: tuple[DraftShape, ...]) -> dict[str, tuple[DraftShape, ...]]:
    """Return the shapes of an engine's only draft."""
    return {"": shapes} if shapes else {}


def entries(forms: list[StepForm]) -> list[ProgramEntry]:
    return [
        ProgramEntry(
            name=form.name,
            file=form.name,
            kind="step",
            batch=form.batch,
            rows=form.rows,
            draft_top_k=form.shape.draft_top_k,
            draft_depth=form.shape.draft_depth,
            draft_tokens=form.shape.draft_tokens,
            full_logits=form.logits != "none",
            launches=1,
            extends=form.extends,
            reverified=form.capacity,
            sparse=form.sparse,
            checks=form.checks,
            drafter=form.drafter,
            is_ragged=form.ragged_rows > 0,
        )
        for form in forms
    ]


def counts(shape: DraftShape, batch: int, **modes: bool) -> tuple[int, int]:
    """Return the number of steps of an engine with these modes, and of one without."""
    shapes = draft_shapes(shape)
    return (
        len(step_forms(parts(**modes), by_draft(shapes), batch)),
        len(step_forms(parts(), by_draft(shapes), batch)),
    )


@pytest.mark.parametrize("batch", [4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("prefilter_head", [False, True], ids=["exact", "screened"])
@pytest.mark.parametrize("modes", ["specpv", "dsa", "specpv dsa"])
def test_lossy_modes_add_at_most_a_quarter(
    modes: str, prefilter_head: bool, shape: DraftShape, batch: int
) -> None:
    result, plain = counts(
        shape, batch, prefilter_head=prefilter_head, **dict.fromkeys(modes.split(), True)
    )
    assert result <= 1.25 * plain


def test_the_number_of_programs_of_the_example() -> None:
    """The engine has four sequences and chains of up to four; the records state these numbers."""
    assert counts(CHAIN, 4, specpv=True, dsa=True) == (43, 36 + 2)
    assert len(exact_forms(parts(specpv=True, dsa=True), by_draft(draft_shapes(CHAIN)), 4)) == 288


def test_without_a_lossy_mode_every_step_is_exact() -> None:
    forms = step_forms(parts(), by_draft(draft_shapes(TREE)), 64)
    forms = [form for form in forms if not form.ragged_rows]
    assert set(forms) == set(exact_forms(parts(), by_draft(draft_shapes(TREE)), 64))
    assert [form.batch for form in forms] == sorted(form.batch for form in forms)


@pytest.mark.parametrize("prefilter_head", [False, True], ids=["exact", "screened"])
@pytest.mark.parametrize("modes", ["specpv", "dsa", "specpv dsa"])
@pytest.mark.parametrize("drafted", [False, True], ids=["alone", "drafted"])
@pytest.mark.parametrize("batch", [1, 2, 4, 64])
def test_every_combination_has_a_program(
    batch: int, drafted: bool, modes: str, prefilter_head: bool
) -> None:
    """Every combination of an exact engine has a program with at least the requested modes."""
    engine_parts: Any = parts(prefilter_head=prefilter_head, **dict.fromkeys(modes.split(), True))
    shapes = draft_shapes(TREE) if drafted else ()
    exact = entries(exact_forms(engine_parts, by_draft(shapes), batch))
    forms = step_forms(engine_parts, by_draft(shapes), batch)
    assert len({form.name for form in forms}) == len(forms)
    table = ProgramTable(SimpleNamespace(programs=entries(forms)))  # type: ignore[arg-type]
    for expected in exact:
        shape = DraftShape(expected.draft_top_k, expected.draft_depth, expected.draft_tokens)
        capacity = min(expected.reverified, table.refresh_capacity(shape, batch=expected.batch))
        assert (capacity > 0) == (expected.reverified > 0)
        result = table.step(
            None if shape == NO_DRAFT else shape,
            batch=expected.batch,
            full_logits=expected.full_logits,
            extends=expected.extends,
            reverified=capacity or None,
            sparse=expected.sparse,
            checks=expected.checks,
        )
        assert result.batch >= expected.batch and result.reverified >= capacity
        assert result.full_logits >= expected.full_logits and result.extends >= expected.extends
        assert result.sparse >= expected.sparse and result.checks >= expected.checks
        # Two passes are for checks, and for several buffers at once.
        assert result.checks == expected.checks or expected.reverified > BUFFER
        hot = not (
            expected.reverified or expected.full_logits or expected.checks or expected.extends
        )
        if hot and (expected.sparse or "dsa" not in modes):
            assert (result.batch, result.rows) == (expected.batch, expected.rows)


def test_hot_steps_are_exact() -> None:
    """Steps over views and with selecting indexers have their exact batch, no spare rows."""
    engine_parts = parts(specpv=True, dsa=True)
    table = ProgramTable(
        SimpleNamespace(
            programs=entries(step_forms(engine_parts, by_draft(draft_shapes(CHAIN)), 4))
        )  # type: ignore[arg-type]
    )
    for batch, logits, sparse, shape in product(
        (1, 2, 4), (False, True), (False, True), (None, CHAIN)
    ):
        result = table.step(shape, batch=batch, full_logits=logits, sparse=sparse)
        assert (result.reverified, result.sparse, result.extends) == (0, sparse, False)
        # Full steps exist for every other batch.
        assert result.batch == (batch if sparse or batch != 2 else 4)


def test_a_refresh_has_the_requested_rows_in_every_program() -> None:
    """The host is notified of at most the rows of each program that it may launch."""
    engine_parts = parts(specpv=True, dsa=True)
    forms = step_forms(engine_parts, by_draft(draft_shapes(CHAIN)), 64)
    table = ProgramTable(SimpleNamespace(programs=entries(forms)))  # type: ignore[arg-type]
    for shape, batch in product((None, *draft_shapes(CHAIN)), (1, 3, 8, 17)):
        capacity = table.refresh_capacity(shape, batch=batch)
        assert capacity >= refresh_capacities(engine_parts.views, 32, shape or NO_DRAFT)[0]
        for sparse, checks in ((False, False), (True, False), (True, True)):
            step = table.step(
                shape, batch=batch, full_logits=True, reverified=capacity, sparse=sparse,
                checks=checks,
            )  # fmt: skip
            assert step.reverified >= capacity
        with pytest.raises(EngineFileError, match="no program"):
            table.step(shape, batch=batch, full_logits=True, reverified=257)


@pytest.mark.parametrize(
    ("shape", "batch", "rows"),
    [
        (CHAIN, 4, {4: [16]}),
        (CHAIN, 32, {4: [16], 8: [32], 16: [64], 32: [64, 96, 128]}),
        (DraftShape(1, 7, 7), 8, {4: [24], 8: [48]}),
        (DraftShape(1, 3, 3), 64, {4: [12], 8: [24], 16: [48], 32: [64, 96], 64: [128, 192]}),
        (TREE, 8, {}),
        (DraftShape(1, 1, 1), 64, {}),
    ],
)
def test_ragged_steps(shape: DraftShape, batch: int, rows: dict[int, list[int]]) -> None:
    """They exist for the longest chain, and for others with many rows; never for trees."""
    forms = step_forms(parts(), by_draft(draft_shapes(shape)), batch)
    by_key: dict[int, list[int]] = {}
    for form in forms:
        if form.ragged_rows:
            assert form.batch < form.ragged_rows < form.batch * (form.shape.draft_tokens + 1)
            suffix = ".logits" if form.logits == "all" else ""
            assert form.name.endswith(f".rows-{form.ragged_rows}{suffix}")
            if not suffix:
                by_key.setdefault(form.batch, []).append(form.rows)
    assert by_key == rows
    table = ProgramTable(SimpleNamespace(programs=entries(forms)))  # type: ignore[arg-type]
    for ragged in table.ragged_shapes():
        smallest = table.min_sequences(ragged)
        step = table.step(ragged, batch=smallest, full_logits=False)
        assert step.is_ragged and step.batch < 2 * smallest
        if ragged.draft_depth == shape.draft_depth:
            with_logits = table.step(ragged, batch=smallest, full_logits=True)
            assert (with_logits.batch, with_logits.rows) == (step.batch, step.rows)
        else:
            with pytest.raises(EngineFileError, match="no program"):
                table.step(ragged, batch=smallest, full_logits=True)
    assert not any(isinstance(shape, RaggedShape) for shape in table.shapes())


@pytest.mark.parametrize("longest", [1, 10, 64, 127])
@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32, 64, 128])
def test_steps_with_host_chains(batch: int, longest: int) -> None:
    """Ragged steps are fewer, have longer chains, and as many tokens in total as uniform ones."""
    equal, ragged = (host_proposal_sizes(batch, longest, ragged=kind) for kind in (False, True))
    assert all(rows == batch * (most + 1) <= MAX_DECODE_ROWS for most, rows in equal)
    assert [rows for _, rows in ragged] == sorted({rows for _, rows in ragged})
    assert len(ragged) <= len(equal)
    assert [rows for _, rows in ragged[-1:]] == [rows for _, rows in equal[-1:]]
    if batch == 1:
        assert ragged == equal
    for most, rows in ragged:
        assert rows // batch - 1 <= most <= min(longest, rows - batch)


@pytest.mark.parametrize("shape", [CHAIN, TREE, DraftShape(1, 3, 3), DraftShape(1, 7, 7)])
@pytest.mark.parametrize("batch", [4, 16, 32, 64])
def test_ragged_steps_do_not_add_programs(shape: DraftShape, batch: int) -> None:
    """With a draft and suffix decoding, chains of the draft add what chains of the host save.

    There is at most one more for each batch, with logits.
    """
    forms = step_forms(parts(), by_draft(draft_shapes(shape)), batch)
    ragged = [form for form in forms if form.ragged_rows]
    added = sum(form.logits == "none" for form in ragged)
    with_logits = [form.batch for form in ragged if form.logits == "all"]
    assert len(set(with_logits)) == len(with_logits)
    saved = sum(
        2
        * (
            len(host_proposal_sizes(b, 64, ragged=False))
            - len(host_proposal_sizes(b, 64, ragged=True))
        )
        for b in batch_buckets(batch)
    )
    assert added <= saved


def test_several_drafts_have_separate_steps() -> None:
    """Each has the steps of a single draft, under its name; steps without a draft exist once."""
    engine_parts = parts()
    engine_parts.drafts = {name: SimpleNamespace(geometry=None) for name in ("eagle3", "dflash")}
    shapes = {"eagle3": draft_shapes(TREE), "dflash": draft_shapes(CHAIN)}
    forms = step_forms(engine_parts, shapes, 4)
    assert len({form.name for form in forms}) == len(forms)
    for drafter, of_draft in shapes.items():
        alone = step_forms(parts(), by_draft(of_draft), 4)
        own = {replace(form, drafter="") for form in forms if form.drafter == drafter}
        assert own == {form for form in alone if form.shape != NO_DRAFT}
        assert {form for form in forms if not form.drafter} == set(alone) - own
    table = ProgramTable(SimpleNamespace(programs=entries(forms)))  # type: ignore[arg-type]
    for drafter, of_draft in shapes.items():
        for shape in of_draft:
            step = table.step(named(drafter, shape), batch=3, full_logits=False)
            assert (step.drafter, step.draft_depth, step.batch) == (drafter, shape.draft_depth, 4)
            assert step.name == f"step@4.{drafter}-{'-'.join(map(str, astuple(shape)))}"
    assert table.shapes() == [
        *(named("eagle3", shape) for shape in draft_shapes(TREE)),
        *(named("dflash", shape) for shape in draft_shapes(CHAIN)),
    ]
    with pytest.raises(RequestError, match="4x5x15 of dflash"):
        table.check_shape(named("dflash", TREE))


def test_each_draft_has_its_own_largest_batch() -> None:
    """A launch has rows for the deepest draft, which wait for every draft."""
    block = DFlashGeometry.__new__(DFlashGeometry)
    object.__setattr__(block, "block_size", 16)
    object.__setattr__(block, "causal", False)
    engine_parts = parts()
    engine_parts.drafts = {
        "eagle3": SimpleNamespace(geometry=None),
        "dflash": SimpleNamespace(geometry=block),
    }
    forms = step_forms(engine_parts, {"eagle3": (CHAIN,), "dflash": (CHAIN,)}, 64)
    most = {
        name: max(f.batch for f in forms if f.drafter == name) for name in ("eagle3", "dflash", "")
    }
    assert most == {"eagle3": 32, "dflash": 16, "": 64}
