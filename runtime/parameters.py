"""The declaration of a request parameter: one annotation on its field, read by every interface.

``SamplingParams`` and ``GenerateParams`` annotate their fields with :class:`Parameter`. The HTTP
routes, lines of ``--prompts``, options of ``specbuild run``, the Dynamo worker and the defaults of
a checkpoint derive their names, types, ranges and help texts from these annotations.
"""

from __future__ import annotations

import difflib
import functools
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from numbers import Real
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from specbuild.runtime.errors import RequestError

Kind = TypeVar("Kind", bound=type)
# Names that other libraries have for what is called otherwise here.
_SYNONYMS = {
    "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "input_ids": "prompt_ids",
    "prompt_token_ids": "prompt_ids",
    "token_ids": "prompt_ids",
    "content": "prompt",
    "input": "prompt",
    "text": "prompt",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "num_threads": "threads",
}


def nearest_name(name: str, names: Collection[str]) -> str | None:
    """Return which of ``names`` is meant by ``name``: the same thing, or the most similar one."""
    meant = _SYNONYMS.get(name)
    if meant in names:
        return meant
    near = difflib.get_close_matches(name, names, n=1)
    return near[0] if near else None


def require_names(given: Collection[str], names: Collection[str], where: str) -> None:
    """Raise RequestError for the first of ``given`` that is not in ``names``, with the nearest."""
    for name in given:
        if name not in names:
            near = nearest_name(name, names)
            hint = f"did you mean {near}?" if near else f"it has {', '.join(sorted(names))}"
            raise RequestError(f"{where} has no {name!r}; {hint}", field=name)


def changed_fields(params: object) -> dict[str, Any]:
    """Return the fields of a dataclass that are not at their defaults, by name."""
    entries = fields(params)  # type: ignore[arg-type]
    values = {entry.name: (getattr(params, entry.name), entry.default) for entry in entries}
    return {name: value for name, (value, default) in values.items() if value != default}


def refuses_unknown(kind: Kind) -> Kind:
    """Decorate a dataclass: an unknown keyword raises RequestError with the nearest name."""
    names = tuple(entry.name for entry in fields(kind) if entry.init)
    return _with_init(kind, lambda given: require_names(given, names, kind.__name__))


def _with_init(kind: Kind, prepare: Callable[[dict[str, Any]], None]) -> Kind:
    """Let ``prepare`` check and change the keywords of a class's constructor."""
    make = kind.__init__  # type: ignore[misc]

    @functools.wraps(make)
    def init(self: Any, *positional: Any, **given: Any) -> None:
        prepare(given)
        make(self, *positional, **given)

    kind.__init__ = init  # type: ignore[misc]
    return kind


def takes_fields_of(part: type, name: str) -> Callable[[Kind], Kind]:
    """Decorate a dataclass whose field ``name`` is a ``part``: its constructor takes the part's
    fields as keywords too. An unknown keyword raises RequestError with the nearest name."""

    def decorate(kind: Kind) -> Kind:
        own = tuple(entry.name for entry in fields(kind))
        flat = tuple(entry.name for entry in fields(part))

        def prepare(given: dict[str, Any]) -> None:
            require_names(given, (*own, *flat), kind.__name__)
            stated = {key: given.pop(key) for key in flat if key in given}
            if stated:
                given[name] = replace(given.get(name) or part(), **stated)

        return _with_init(kind, prepare)

    return decorate


def whole_number(name: str, value: object, *, field: str | None = None) -> int:
    """Return ``value`` as an int. RequestError, of this ``field``, if it is not a whole number."""
    try:
        return int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        raise RequestError(f"{name} is {value!r}, must be a whole number", field=field) from None


@dataclass(frozen=True)
class Range:
    """The values of a number: from ``minimum`` to ``maximum``, without a bound if that is None.

    ``allows_zero`` adds 0 to the range. ``text`` replaces the description in error messages.
    """

    minimum: float
    maximum: float | None = None
    excludes_minimum: bool = False
    allows_zero: bool = False
    text: str = ""

    def __contains__(self, value: float) -> bool:
        """Return whether the range has this value. Not-a-number is in no range."""
        if self.allows_zero and value == 0:
            return True
        above = value > self.minimum if self.excludes_minimum else value >= self.minimum
        return above and (self.maximum is None or value <= self.maximum)

    def __str__(self) -> str:
        if self.text:
            return self.text
        minimum, zero = _number(self.minimum), "0 or " if self.allows_zero else ""
        if self.excludes_minimum:
            limit = "" if self.maximum is None else f" and at most {_number(self.maximum)}"
            return f"{zero}above {minimum}{limit}"
        if self.maximum is None:
            return f"{zero}{minimum} or above"
        return f"{zero}{minimum} to {_number(self.maximum)}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """What interfaces need to know of a parameter, in ``Annotated`` next to its type.

    ``help`` and ``metavar`` are those of its command-line option. ``server_default`` is the default
    of the HTTP API and of Dynamo where it differs from Python's. With ``model_default`` a
    checkpoint may recommend a default, which takes precedence over both. ``aliases`` are further
    values of other APIs. ``json_type`` is the type in JSON where Python's is none.
    The HTTP routes of generation share the parameters that are ``in_api``; a line of ``--prompts``
    may set those that are ``in_line``.
    """

    help: str = ""
    metavar: str | None = None
    range: Range | None = None
    server_default: Any = None
    model_default: bool = False
    aliases: Mapping[Any, Any] = field(default_factory=dict)
    json_type: Any = None
    in_api: bool = False
    in_line: bool = True


@dataclass(frozen=True)
class DeclaredParameter:
    """A parameter with the name, the type and the default of its field."""

    name: str
    type: Any
    default: Any
    declaration: Parameter

    @property
    def json_type(self) -> Any:
        """The type of its JSON value, null aside."""
        return self.type if self.declaration.json_type is None else self.declaration.json_type

    @property
    def range(self) -> Range | None:
        """The values of a number; None for other types."""
        return self.declaration.range

    def resolve(self, value: Any) -> Any:
        """Return the value of a decoded JSON value: aliases replaced, lists as tuples."""
        if isinstance(value, list):
            return tuple(value)
        return self.declaration.aliases.get(value, value) if self.declaration.aliases else value

    def check(self, value: Any) -> None:
        """Raise RequestError if a number has another type or is out of range."""
        if self.range is None:
            return
        if self.type is int:
            whole_number(self.name, value, field=self.name)
        elif not isinstance(value, Real):
            raise RequestError(f"{self.name} is {value!r}, must be a number", field=self.name)
        if value not in self.range:
            raise RequestError(f"{self.name} is {value}, must be {self.range}", field=self.name)


@cache
def declared_parameters(kind: type) -> dict[str, DeclaredParameter]:
    """Return the parameters among the fields of a dataclass, by name, in their order."""
    hints = get_type_hints(kind, include_extras=True)
    declared = {}
    for entry in fields(kind):
        hint = hints[entry.name]
        if get_origin(hint) is Annotated:
            type_, declaration = get_args(hint)
            declared[entry.name] = DeclaredParameter(entry.name, type_, entry.default, declaration)
    return declared


def check_ranges(params: object) -> None:
    """Raise RequestError for the first declared parameter of a dataclass that is out of range."""
    kind: type = type(params)
    for parameter in _ranged_parameters(kind):
        value = getattr(params, parameter.name)
        # Defaults are in range, and most values are defaults.
        if value is not parameter.default:
            parameter.check(value)


@cache
def _ranged_parameters(kind: type) -> tuple[DeclaredParameter, ...]:
    """Return the declared parameters that have a range."""
    return tuple(p for p in declared_parameters(kind).values() if p.range is not None)
