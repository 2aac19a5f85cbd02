"""Distributes the bytes that op calls read among their launches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from math import prod

from specbuild.runtime.engine_dir.plan import (
    ITEM_BYTES,
    POINTER,
    Binding,
    OpCall,
    Plan,
    Program,
    ProgramEntry,
    level_section,
)
from specbuild.runtime.engine_dir.traffic import Term, Traffic
from specbuild.runtime.measure.byte_floor import Work, pass_traffic

Place = tuple[int, int]  # buffer, offset


@dataclass(frozen=True)
class _Share:
    """Terms of a call, and how many of the counted bytes are at each place of launches."""

    terms: tuple[Term, ...]
    nbytes_at: Mapping[Place, int]


def launch_bytes(plan: Plan, entry: ProgramEntry, program: Program, work: Work) -> list[float]:
    """Return the bytes that each launch of a step or a prompt must read, in order.

    ``work`` is the target's. The bytes of a call go to those of its launches that point to the
    counted tensors: complete weights, lookup tables, experts, or a cache. Several launches share
    them in proportion to the tensors that they point to.
    """
    launches: dict[int, list[int]] = defaultdict(list)
    for index, launch in enumerate(program.launches):
        launches[launch.op].append(index)
    read_bytes, works = [0.0] * len(program.launches), _level_works(entry, work)
    for op, indices in launches.items():
        call = program.ops[op]
        if call.traffic is None:
            continue
        for share in _shares(plan, call, call.traffic):
            single = replace(call, traffic=replace(call.traffic, read=share.terms))
            amount = pass_traffic([single]).bytes_read(works.get(call.section, work)).total
            weights = [
                sum(
                    share.nbytes_at.get(place, 0)
                    for place in _places(program.launches[i].arguments)
                )
                for i in indices
            ]
            for index, part in zip(indices, _split(amount, weights), strict=True):
                read_bytes[index] += part
    return read_bytes


def _level_works(entry: ProgramEntry, target: Work) -> dict[str, Work]:
    """Return the work of the draft's levels: one row per sequence, then the width of the tree.

    For a prompt the draft ingests every row and samples no tokens.
    """
    if entry.kind == "prefill":
        return {level_section(1): replace(target, experts=0.0, logit_rows=0)}
    works = {}
    for level in range(1, max(entry.draft_depth, 1) + 1):
        rows = target.batch * (1 if level == 1 else entry.draft_top_k)
        works[level_section(level)] = Work(rows, target.batch, target.context, experts=0.0)
    return works


def _places(arguments: Sequence[Sequence[int]]) -> set[Place]:
    return {(argument[1], argument[2]) for argument in arguments if argument[0] == POINTER}


def _split(amount: float, weights: Sequence[int]) -> Iterator[float]:
    """Yield shares in proportion to the weights; all to the first if the weights are zero."""
    total = sum(weights)
    for index, weight in enumerate(weights):
        yield amount * weight / total if total else amount * (index == 0)


def _shares(plan: Plan, call: OpCall, traffic: Traffic) -> Iterator[_Share]:
    """Yield the terms of a call by unit, each with the sizes of the counted tensors."""
    bound = {(each.buffer, each.offset): each for each in call.inputs.values()}
    spaces = {place: plan.buffers[place[0]].space for place in bound}
    sizes = {place: _nbytes(each) for place, each in bound.items() if spaces[place] == "weights"}
    expert_amount = sum(t.amount for t in traffic.read if t.per == "chosen_expert")
    shared = traffic.shared_experts
    fixed = sum(t.amount for t in traffic.read if t.per == "pass") - shared * expert_amount
    complete = _summing(sizes, fixed)
    experts = {
        place: nbytes
        for place, nbytes in sizes.items()
        if place not in complete and bound[place].shape[:1] == (traffic.experts + shared,)
    }
    places = {
        "cache": {place: 1 for place, space in spaces.items() if space == "cache"},
        "pass": {place: sizes[place] for place in complete},
        "chosen_expert": experts,
    }
    lookup_tables = {p: n for p, n in sizes.items() if p not in complete and p not in experts}
    kinds: dict[str, list[Term]] = defaultdict(list)
    for term in traffic.read:
        is_shared = shared and (term.per, term.amount) == ("pass", shared * expert_amount)
        per = "chosen_expert" if is_shared else term.per
        kinds["cache" if term.part.startswith("kv_") else per].append(term)
    for kind, terms in kinds.items():
        yield _Share(tuple(terms), places.get(kind, lookup_tables) or sizes)


def _nbytes(binding: Binding) -> int:
    return ITEM_BYTES[binding.dtype] * prod(binding.shape)


def _summing(sizes: Mapping[Place, int], amount: int) -> frozenset[Place]:
    """Return the tensors whose bytes add up to an amount; none if there is no such set.

    The traffic of a call has only sums for tensors read completely, and for those read in part.
    """
    places = tuple(sizes)
    indices = _subset(tuple(sizes[place] for place in places), amount)
    return frozenset(places[i] for i in indices)


@cache
def _subset(sizes: tuple[int, ...], amount: int) -> tuple[int, ...]:
    if amount:
        for count in range(len(sizes), 0, -1):
            for indices in combinations(range(len(sizes)), count):
                if sum(sizes[i] for i in indices) == amount:
                    return indices
    return ()
