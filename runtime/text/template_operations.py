"""What a chat template may do with values: each operation is counted before it is done."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from functools import wraps
from types import BuiltinMethodType
from typing import Any

from specbuild.runtime.text.template_meter import (
    Meter,
    TemplateOverBoundsError,
    check_count,
    check_int,
)

# Others make text or lists of any size, or walk through text in ways that take its square.
_FILTERS = """abs attr batch capitalize center count d default dictsort e escape first float format
    groupby indent int items join last length list lower map max min reject rejectattr
    replace reverse round safe select selectattr slice sort string sum title tojson trim
    truncate unique upper wordcount"""
FILTERS = frozenset(_FILTERS.split())
_TEXT_METHODS = """capitalize casefold center count endswith find format format_map index isalnum
    isalpha isascii isdecimal isdigit islower isnumeric isspace istitle isupper join ljust lower
    lstrip partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip
    split splitlines startswith strip swapcase title upper zfill"""
GLOBALS = frozenset({"range", "dict", "namespace"})
_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(_TEXT_METHODS.split()),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
}
# Filters that make one text of whatever they are given.
_SHOWING = frozenset({"e", "escape", "lower", "string", "title", "tojson", "trim", "upper"})
# Filters that compare what they are given.
_COMPARING = frozenset({"dictsort", "groupby", "max", "min", "sort", "unique"})
# Methods whose time is the product of both lengths at worst.
_SEARCHING = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"})
_COUNTED_METHODS = frozenset({"center", "ljust", "rjust", "zfill"})
_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "**": operator.pow,
    "%": operator.mod,
}
OPERATORS = frozenset(_OPERATORS)
_PARTS = (str, list, tuple)
_NUMBER = re.compile(r"\d+")
_WIDTH_OF_VALUE = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")


def binary(meter: Meter, name: str, left: Any, right: Any) -> Any:
    """``left`` and ``right`` under an operator, or TemplateOverBoundsError."""
    meter.step()
    if isinstance(left, int) and isinstance(right, int):
        _check_result(name, left, right)
    elif name == "+" and isinstance(left, _PARTS) and isinstance(right, _PARTS):
        _grow(meter, left, len(left) + len(right))
    elif name == "*" and isinstance(left, _PARTS) and isinstance(right, int):
        _grow(meter, left, len(left) * max(right, 0))
    elif name == "*" and isinstance(right, _PARTS) and isinstance(left, int):
        _grow(meter, right, len(right) * max(left, 0))
    elif name == "%" and isinstance(left, str):
        meter.text(_formatted_size(meter, left, (right,)))
    return _OPERATORS[name](left, right)


def check_call(
    meter: Meter, called: Any, given: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The arguments of a call, counted: TemplateOverBoundsError where it makes too much.

    Methods that no chat needs are refused too.
    """
    meter.step()
    called = getattr(called, "__wrapped__", called)  # the sandbox wraps str.format
    if not isinstance(called, BuiltinMethodType) or called.__self__ is None:
        return given
    owner, name = called.__self__, called.__name__
    methods = next((m for kind, m in _METHODS.items() if isinstance(owner, kind)), frozenset())
    if name not in methods:
        raise TemplateOverBoundsError(
            f"it calls {type(owner).__name__}.{name}, which no chat needs"
        )
    if name in ("count", "index"):
        meter.weighed((owner, *given))
    if isinstance(owner, str):
        return _checked_text_call(meter, owner, name, (*given, *named.values()), given)
    return given


def _checked_text_call(
    meter: Meter, owner: str, name: str, values: tuple[Any, ...], given: tuple[Any, ...]
) -> tuple[Any, ...]:
    """``given``, or what of it can be read only once, of a method of a text."""
    if name in _COUNTED_METHODS:
        for value in values:
            check_count(value)
    elif name in _SEARCHING:
        meter.compared(len(owner) * sum(len(v) for v in values if isinstance(v, str)))
    elif name == "replace":
        meter.text(_replaced_size(owner, values))
    elif name == "join" and given:
        parts = meter.walked(given[0])
        meter.text(_joined_size(meter, parts, owner))
        return (parts, *given[1:])
    elif name in ("format", "format_map"):
        meter.text(_formatted_size(meter, owner, values))
    return given


def bounded_filter(meter: Meter, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, counted before and after; ``function`` may ask for jinja2's context first."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*given: Any, **named: Any) -> Any:
        meter.step()
        before, values = given[:skipped], list(given[skipped:])
        options = (*values[1:], *named.values())
        for option in options:
            check_count(option)
        if values:
            values[0] = _checked_input(meter, name, values[0], options)
        return meter.made(function(*before, *values, **named))

    return bounded


def bounded_test(meter: Meter, function: Callable[..., Any]) -> Callable[..., Any]:
    """The test (``is``), its values counted; ``function`` may ask for jinja2's context first."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*given: Any) -> Any:
        if len(given) > skipped + 1:  # with one value there is nothing to compare
            meter.weighed(given[skipped:])
        return function(*given)

    return bounded


def _checked_input(meter: Meter, name: str, value: Any, options: tuple[Any, ...]) -> Any:
    """A filter's first value, or the list of what it can give only once."""
    if name == "join":
        value = meter.walked(value)
        separator = next((o for o in options if isinstance(o, str)), "")
        meter.text(_joined_size(meter, value, separator))
    elif name == "replace":
        texts = [o if isinstance(o, str) else " " * meter.text_size(o) for o in options]
        meter.text(_replaced_size(str(value) if meter.text_size(value) else "", texts))
    elif name == "format":
        meter.text(_formatted_size(meter, str(value), options))
    elif name == "indent" and isinstance(value, str):
        width = next((o for o in options if not isinstance(o, bool)), 4)
        each = width if isinstance(width, int) else meter.text_size(width)
        meter.text(len(value) + (value.count("\n") + 1) * abs(each))
    elif name in _COMPARING:
        meter.weighed(value)
    elif name == "trim" and isinstance(value, str):
        meter.text(len(value))
        meter.compared(len(value) * sum(len(o) for o in options if isinstance(o, str)))
    elif name in ("batch", "slice") and len(options) > 1:
        meter.text(sum(o for o in options if isinstance(o, int)) * meter.text_size(options))
    elif name == "sum" and any(isinstance(option, _PARTS) for option in options):
        raise TemplateOverBoundsError("it sums lists")
    elif isinstance(value, str) or not hasattr(value, "__len__") or name in _SHOWING:
        meter.text(meter.text_size(value))
    else:
        meter.step(len(value))
    return value


def _check_result(name: str, left: int, right: int) -> None:
    check_int(left)
    check_int(right)
    if name == "**" and right > 0:
        check_int(1 << min(left.bit_length() * right, 1 << 20))


def _grow(meter: Meter, parts: str | list[Any] | tuple[Any, ...], size: int) -> None:
    if isinstance(parts, str):
        meter.text(size)
    else:
        meter.step(size)


def _replaced_size(text: str, values: Any) -> int:
    old, new = ([v for v in values if isinstance(v, str)] + ["", ""])[:2]
    return len(text) + text.count(old) * len(new)


def _joined_size(meter: Meter, parts: list[Any], separator: str) -> int:
    return sum(map(meter.text_size, parts)) + len(parts) * len(separator)


def _formatted_size(meter: Meter, text: str, values: tuple[Any, ...]) -> int:
    """Characters at most: every field may show every value, at every width that is named."""
    if _WIDTH_OF_VALUE.search(text):
        raise TemplateOverBoundsError("it formats to a width that is computed")
    widths = sum(int(number[:9]) for number in _NUMBER.findall(text))
    fields = text.count("%") + text.count("{")
    return len(text) + widths + fields * sum(map(meter.text_size, values))
