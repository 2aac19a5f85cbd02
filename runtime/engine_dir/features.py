"""Features of the format: additions after its version, which older runtimes refuse by name.

A key added to the manifest belongs to a feature and has a default: ``field(default=…,
metadata=of_feature("name"))``. It is written only if it differs from the default; the engine then
lists the feature. An engine that does not use the feature still loads in an older runtime. One that
does is refused by the feature's name. If the key is missing, the default applies.

Values added to a field that is :func:`one_of` a set, and members added to a tagged union (their
``FEATURE``), belong to a feature in the same way.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from specbuild.runtime.engine_dir.strict_json import VALUES, field_types, open_union, to_json
from specbuild.runtime.errors import SpecbuildError

# Each value, and the feature that added it: None for values of the first version.
FeatureOf: TypeAlias = Mapping[str, str | None]

_FEATURE = "feature"
# Types without nested values, which are most of a manifest.
_PLAIN = (str, int, float, type(None))


def of_feature(name: str) -> dict[str, Any]:
    """Return the metadata of an optional key."""
    return {_FEATURE: name}


def one_of(values: FeatureOf) -> dict[str, Any]:
    """Return the metadata of a string, or of strings, that must be among ``values``."""
    return {VALUES: values}


def known_features(kind: type) -> frozenset[str]:
    """Return all features of the keys, values and union members of the dataclass ``kind``."""
    return frozenset(feature for feature in _of_schema(kind, set()) if feature is not None)


def used_features(record: Any) -> tuple[str, ...]:
    """Return the features that ``record`` uses, sorted."""
    features_found: set[str | None] = set()
    _add_features(record, features_found)
    return tuple(sorted(feature for feature in features_found if feature is not None))


def stored_json(record: Any) -> dict[str, Any]:
    """Return the JSON form of a dataclass with ``features``.

    The features that it uses are listed; optional keys with default values are omitted.
    """
    listed = dataclasses.replace(record, features=used_features(record))
    stored: dict[str, Any] = to_json(listed, leave_out=_is_default)
    return stored


def stored_keys(record: Any) -> dict[str, Any]:
    """Return the JSON form of a dataclass outside the manifest; optional keys are omitted alike."""
    stored: dict[str, Any] = to_json(record, leave_out=_is_default)
    return stored


def require_known(kind: type, features: Iterable[str]) -> None:
    """Raise SpecbuildError with the names of an engine's ``features`` that ``kind`` lacks."""
    if not set(features):
        return  # The common case returns before the types of the schema are examined.
    missing = sorted(set(features) - known_features(kind))
    if missing:
        # Imported here because it takes longer than the other modules of a manifest.
        import importlib.metadata

        plural, named = "s" if len(missing) > 1 else "", ", ".join(map(repr, missing))
        raise SpecbuildError(
            f"engine needs feature{plural} {named}, which this specbuild "
            f"({importlib.metadata.version('specbuild')}) does not have; update it"
        )


def require_listed(record: Any, features: Iterable[str]) -> None:
    """Raise SpecbuildError if ``record`` uses a feature that is not among ``features``."""
    missing = sorted(set(used_features(record)) - set(features))
    if missing:
        raise SpecbuildError(f"feature {missing[0]!r} is used, but not listed in features")


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    """Return whether an optional key has its default value."""
    if _FEATURE not in field.metadata:
        return False
    factory = field.default_factory
    default: Any = field.default if factory is dataclasses.MISSING else factory()
    return bool(value == default)


def _add_features(record: Any, features_found: set[str | None]) -> None:
    """Add the features that ``record`` and its parts use."""
    if isinstance(record, tuple | dict):
        for item in record.values() if isinstance(record, dict) else record:
            if not isinstance(item, _PLAIN):
                _add_features(item, features_found)
    elif dataclasses.is_dataclass(record):
        features_found.add(getattr(record, "FEATURE", None))
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            if not _is_default(field, value):
                features_found.add(field.metadata.get(_FEATURE))
            values: FeatureOf = field.metadata.get(VALUES, {})
            if values:
                items = value if isinstance(value, tuple) else (value,)
                features_found.update(values.get(item) for item in items if isinstance(item, str))
            if not isinstance(value, _PLAIN):
                _add_features(value, features_found)


def _of_schema(kind: Any, visited: set[Any]) -> Iterator[str | None]:
    for argument in typing.get_args(kind):
        yield from _of_schema(argument, visited)
    for member in (open_union(kind) or {}).values():
        yield from _of_schema(member, visited)
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind) or kind in visited:
        return
    visited.add(kind)
    yield getattr(kind, "FEATURE", None)
    for field in dataclasses.fields(kind):
        yield field.metadata.get(_FEATURE)
        yield from field.metadata.get(VALUES, {}).values()
    for hint in field_types(kind).values():
        yield from _of_schema(hint, visited)
