"""Options as fields of frozen dataclasses: type, default, bounds, help and name in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, fields
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

from specbuild.runtime.engine_dir.drafters.registry import HOST_NAMES
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    HostDrafterName: TypeAlias = str
else:
    # The drafters without weights that --drafter builds.
    HostDrafterName = Literal[HOST_NAMES]

# Deprecated flat names of options and the current ones, accepted until 0.3.
RENAMED_OPTIONS = {"screen_head": "prefilter_head"}
# Engines count tokens, rows and pages in 32 bits.
MAX_INTEGER = 2**31 - 1


@dataclass(frozen=True)
class Described:
    """An option's description: ``Annotated[int, Described("Its help.")]``.

    ``name`` replaces the group's prefix and the field's name; ``flags`` replaces the flags on the
    command line, as ``--dsa/--no-dsa``. ``usual`` is the value of a build if the option is None;
    ``shown`` is the default in help, or a function of it. Values must be between ``least`` and
    ``most``. A manifest has the option if it is ``recorded``.

    If the field's type cannot be given on a command line, the option has the type ``typed``, and
    ``read`` computes the value from the option's flag and the given value. A subclass that changes
    the default of a field need not describe it again.
    """

    help: str
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    name: str | None = None
    flags: str | None = None
    panel: str | None = None
    usual: Any = None
    shown: str | Callable[[Any], str] | None = None
    recorded: bool = True
    typed: Any = None
    read: Callable[[str, Any], Any] | None = None


@dataclass(frozen=True)
class Option:
    """One option of a group, or of a nested group.

    ``name`` is its flat name: ``draft_top_k`` for ``--draft-top-k``; ``field`` is the name of its
    field. ``default`` is ``dataclasses.MISSING`` if it is required.
    """

    name: str
    field: str
    type: Any
    default: Any
    panel: str
    described: Described

    @property
    def flag(self) -> str:
        """Return the option as messages name it, ``--draft-top-k``."""
        return f"--{self.name.replace('_', '-')}"


class OptionGroup:
    """A frozen dataclass of options and of nested groups; it may also have plain fields.

    ``PREFIX`` begins the flat names of its options, ``PANEL`` is their heading in help.
    """

    PREFIX: ClassVar[str] = ""
    PANEL: ClassVar[str] = "Options"

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        """Yield every option, those of nested groups in place."""
        return tuple(_options_of(cls))

    @classmethod
    def flag(cls, name: str) -> str:
        """Return the spelling of a field's option on the command line."""
        return _own_options(cls)[name].flag

    @classmethod
    def usual(cls) -> dict[str, Any]:
        """Return the effective defaults by field, if they are single values."""
        found = {name: entry.described.usual for name, entry in _own_options(cls).items()}
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def from_flat(cls, **values: Any) -> Self:
        """Return a group from flat names such as ``draft_top_k``; others have their defaults.

        Raises TypeError for a name that no option has.
        """
        left = {RENAMED_OPTIONS.get(name, name): value for name, value in values.items()}
        made: Self = _built(cls, left)
        if left:
            raise TypeError(f"{cls.__name__} has no option {next(iter(left))}")
        return made

    @classmethod
    def from_given(cls, given: Mapping[str, Any]) -> Self:
        """Return a group from values of a command line or a file, as :meth:`from_flat`.

        None selects the default of an option with a reader. SpecbuildError for an invalid value.
        """
        values = dict(given)
        for option in cls.options():
            if option.described.read is not None and option.name in values:
                value = values.pop(option.name)
                if value is not None:
                    values[option.name] = option.described.read(option.flag, value)
        return cls.from_flat(**values)

    @classmethod
    def check_bounds(cls, values: Mapping[str, Any]) -> None:
        """Raise SpecbuildError for the first number, by field, below its minimum.

        An integer without an upper bound must be at most :data:`MAX_INTEGER`.
        """
        own = _own_options(cls)
        for name, value in values.items():
            described = own[name].described
            least = described.least
            is_count = isinstance(value, int) and described.read is None
            if least is not None and value is not None and value < least:
                raise SpecbuildError(f"{own[name].flag} is {value}; it must be at least {least:g}")
            if is_count and described.most is None and value > MAX_INTEGER:
                raise SpecbuildError(
                    f"{own[name].flag} is {value}; it must be at most {MAX_INTEGER}"
                )

    def given(self) -> dict[str, Any]:
        """Return the options that are not at their defaults, by field."""
        found = {
            name: (getattr(self, name), o.default) for name, o in _own_options(type(self)).items()
        }
        return {name: value for name, (value, default) in found.items() if value != default}

    def flat(self) -> dict[str, Any]:
        """Return every option's value by its flat name."""
        found: dict[str, Any] = {}
        own = _own_options(type(self))
        for entry, _ in _hinted_fields(type(self)):
            value = getattr(self, entry.name)
            if entry.name in own:
                found[own[entry.name].name] = value
            elif isinstance(value, OptionGroup):
                found |= value.flat()
        return found

    def recorded(self) -> dict[str, Any]:
        """Return the recorded options among ``flat``."""
        names = {entry.name for entry in self.options() if entry.described.recorded}
        return {name: value for name, value in self.flat().items() if name in names}


class HostDrafterOptions(OptionGroup):
    """Options of a drafter that proposes on the host; ``PREFIX`` is its kind."""


def _own_options(kind: type[OptionGroup]) -> dict[str, Option]:
    """Yield the options that are fields of the group itself."""
    described_in: dict[str, Described] = {}
    for base in reversed(kind.__mro__):
        if is_group(base) and base is not OptionGroup:
            hints = get_type_hints(base, include_extras=True)
            described_in |= {k: get_args(h)[1] for k, h in hints.items() if _is_described(h)}
    found = {}
    for entry, hint in _hinted_fields(kind):
        if entry.name in described_in:
            described = described_in[entry.name]
            type_ = get_args(hint)[0] if _is_described(hint) else hint
            name = described.name or "_".join(filter(None, (kind.PREFIX, entry.name)))
            panel = described.panel or kind.PANEL
            found[entry.name] = Option(name, entry.name, type_, entry.default, panel, described)
    return found


def _options_of(kind: type[OptionGroup]) -> Iterator[Option]:
    own = _own_options(kind)
    for entry, hint in _hinted_fields(kind):
        if entry.name in own:
            yield own[entry.name]
        elif is_group(hint):
            yield from _options_of(hint)


def _built(kind: type[OptionGroup], left: dict[str, Any]) -> Any:
    """Return the group from the flat values, and remove these from ``left``."""
    own, given = _own_options(kind), {}
    for entry, hint in _hinted_fields(kind):
        if entry.name in own and own[entry.name].name in left:
            given[entry.name] = left.pop(own[entry.name].name)
        elif is_group(hint):
            given[entry.name] = _built(hint, left)
    return kind(**given)


def _is_described(hint: Any) -> bool:
    return get_origin(hint) is Annotated and isinstance(get_args(hint)[1], Described)


def is_group(kind: Any) -> bool:
    """Return whether this type is a group of options."""
    return isinstance(kind, type) and issubclass(kind, OptionGroup)


def _hinted_fields(kind: type[OptionGroup]) -> list[tuple[Field[Any], Any]]:
    hints = get_type_hints(kind, include_extras=True)
    entries: tuple[Field[Any], ...] = fields(kind)  # type: ignore[arg-type]
    return [(entry, hints[entry.name]) for entry in entries]
