"""The element types and axes of graph ports, for checks.

The letters of axes are defined in docs/developers/contracts.md#graphs.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

# The suffix of a pool's name as the output of a graph.
OUT = ".out"


class Form(NamedTuple):
    """A port's element type and axes: a size, or the letter of an axis of any size."""

    dtype: str
    shape: tuple[int | str, ...]


Forms: TypeAlias = dict[str, Form]


def ints(*shape: int | str) -> Form:
    """Return the form of an int32 port."""
    return Form("int32", shape)


def floats(*shape: int | str) -> Form:
    """Return the form of an fp32 port."""
    return Form("float32", shape)


def launch_forms() -> Forms:
    """Return the inputs of every launch of a model's graph."""
    return {
        "token_ids": ints("T"),
        "positions": ints("T"),
        "row_start": ints("B1"),
        "ancestor_bits": ints("T", "W"),
        "logit_rows": ints("R"),
    }


def view_forms(group: str) -> Forms:
    """Return the inputs that place rows in the caches of a group."""
    return {
        f"{group}.page_table": ints("Lg", "B", "G", "P"),
        f"{group}.row_slot": ints("T"),
        f"{group}.tree_start": ints("B"),
        f"{group}.write_slot": ints("T"),
    }


def path_forms(group: str) -> Forms:
    """Return the inputs that map rows to the states of a group: S paths of up to L rows."""
    return {
        f"{group}.path_rows": ints("S", "L"),
        f"{group}.read_slot": ints("S"),
        f"{group}.write_slot": ints("S"),
    }


def written(pools: Forms) -> Forms:
    """Return the pools as outputs of a graph."""
    return {name + OUT: form for name, form in pools.items()}
