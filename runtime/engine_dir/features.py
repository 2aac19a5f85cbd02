"""Features of the format: what came after its version, and how an older runtime refuses it.

A later key of the manifest belongs to a feature and has a default: ``field(default=…,
metadata=of_feature("name"))``. It is written only where it differs from the default, and then
the engine lists the feature. So an engine that does without it loads in an older runtime, one that
needs it is refused by the feature's name, and an older engine's missing key has the default.

A later value of a field that is :func:`one_of` a set, and a later member of a tagged union (its
``FEATURE``), belong to a feature in the same way.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from specbuild.runtime.engine_dir.strict_json import VALUES, field_types, open_union, to_json
from specbuild.runtime.errors import SpecbuildError

# A value, and the feature that brings it: None for one that the version has always had.
FeatureOf: TypeAlias = Mapping[str, str | None]

_FEATURE = "feature"
# Values that hold no others, most of a manifest.
_PLAIN = (str, int, float, type(None))


def of_feature(name: str) -> dict[str, Any]:
    """Metadata of an optional key."""
    return {_FEATURE: name}


def one_of(values: FeatureOf) -> dict[str, Any]:
    """Metadata of a string, or of strings, that must be among ``values``."""
    return {VALUES: values}


def known_features(kind: type) -> frozenset[str]:
    """Every feature that keys, values and union members of the dataclass ``kind`` belong to."""
    return frozenset(feature for feature in _of_schema(kind, set()) if feature is not None)


def used_features(record: Any) -> tuple[str, ...]:
    """The features that ``record`` makes use of, sorted."""
    found: set[str | None] = set()
    _add_features(record, found)
    return tuple(sorted(feature for feature in found if feature is not None))


def stored_json(record: Any) -> dict[str, Any]:
    """A dataclass with ``features`` as its file holds it.

    The features that it makes use of are listed; optional keys with their defaults are left out.
    """
    listed = dataclasses.replace(record, features=used_features(record))
    stored: dict[str, Any] = to_json(listed, leave_out=_says_nothing)
    return stored


def stored_keys(record: Any) -> dict[str, Any]:
    """A dataclass beside the manifest as its file holds it: optional keys as there."""
    stored: dict[str, Any] = to_json(record, leave_out=_says_nothing)
    return stored


def require_known(kind: type, features: Iterable[str]) -> None:
    """SpecbuildError names those of an engine's ``features`` that ``kind`` does not know."""
    if not set(features):
        return  # the common case, without a look at every type of the schema
    missing = sorted(set(features) - known_features(kind))
    if missing:
        # Here, because its import takes longer than that of the other modules of a manifest.
        import importlib.metadata

        plural, named = "s" if len(missing) > 1 else "", ", ".join(map(repr, missing))
        raise SpecbuildError(
            f"engine needs feature{plural} {named}, which this specbuild "
            f"({importlib.metadata.version('specbuild')}) does not have; update it"
        )


def require_listed(record: Any, features: Iterable[str]) -> None:
    """SpecbuildError where ``record`` makes use of a feature that is not among ``features``."""
    missing = sorted(set(used_features(record)) - set(features))
    if missing:
        raise SpecbuildError(f"feature {missing[0]!r} is used, but not listed in features")


def _says_nothing(field: dataclasses.Field[Any], value: Any) -> bool:
    """Whether an optional key has its default."""
    if _FEATURE not in field.metadata:
        return False
    made = field.default_factory
    default: Any = field.default if made is dataclasses.MISSING else made()
    return bool(value == default)


def _add_features(record: Any, found: set[str | None]) -> None:
    """Adds what ``record`` and all within it make use of."""
    if isinstance(record, tuple | dict):
        for item in record.values() if isinstance(record, dict) else record:
            if not isinstance(item, _PLAIN):
                _add_features(item, found)
    elif dataclasses.is_dataclass(record):
        found.add(getattr(record, "FEATURE", None))
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            if not _says_nothing(field, value):
                found.add(field.metadata.get(_FEATURE))
            values: FeatureOf = field.metadata.get(VALUES, {})
            if values:
                items = value if isinstance(value, tuple) else (value,)
                found.update(values.get(item) for item in items if isinstance(item, str))
            if not isinstance(value, _PLAIN):
                _add_features(value, found)


def _of_schema(kind: Any, seen: set[Any]) -> Iterator[str | None]:
    for argument in typing.get_args(kind):
        yield from _of_schema(argument, seen)
    for member in (open_union(kind) or {}).values():
        yield from _of_schema(member, seen)
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind) or kind in seen:
        return
    seen.add(kind)
    yield getattr(kind, "FEATURE", None)
    for field in dataclasses.fields(kind):
        yield field.metadata.get(_FEATURE)
        yield from field.metadata.get(VALUES, {}).values()
    for hint in field_types(kind).values():
        yield from _of_schema(hint, seen)
