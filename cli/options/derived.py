"""Derives command lines from option groups: commands have groups, users see their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from specbuild.builder.option_group import Option, OptionGroup, is_group


@dataclass(frozen=True)
class Without:
    """An annotation of a group: the fields that this command does not offer."""

    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Spread:
    """A parameter of a command that is a group, and its options on the command line."""

    group: type[OptionGroup]
    options: tuple[Option, ...]

    def taken_from(self, values: dict[str, Any]) -> OptionGroup:
        """Return the group, and remove its values from ``values``."""
        return self.group.from_given({o.name: values.pop(o.name) for o in self.options})


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command for typer, with options in place of parameters that are groups.

    The command is called with groups built from the given options.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    spread: dict[str, _Spread] = {}
    for parameter in inspect.signature(command).parameters.values():
        group = _spread(hints[parameter.name])
        if group is None:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
        else:
            spread[parameter.name] = group
            parameters += map(_parameter, group.options)

    def called(**values: Any) -> None:
        groups = {name: entry.taken_from(values) for name, entry in spread.items()}
        command(**groups, **values)

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__module__, called.__qualname__ = command.__module__, command.__qualname__
    called.__annotations__ = {entry.name: entry.annotation for entry in parameters}
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return called


def _spread(hint: Any) -> _Spread | None:
    """Return the group of a parameter's type, or None for an ordinary parameter."""
    group, left_out = hint, Without()
    if get_origin(hint) is Annotated:
        group, *rest = get_args(hint)
        left_out = next((entry for entry in rest if isinstance(entry, Without)), left_out)
    if not is_group(group):
        return None
    options = (option for option in group.options() if option.field not in left_out.fields)
    return _Spread(group, tuple(options))


def _parameter(option: Option) -> inspect.Parameter:
    described = option.described
    kind = described.typed or option.type
    if described.read is not None and option.default is not MISSING:
        kind = kind | None
    usual = None if described.usual is None else str(described.usual)
    shown = described.shown(option.default) if callable(described.shown) else described.shown
    declared = typer.Option(
        described.flags or option.flag,
        metavar=described.metavar,
        min=described.least,
        max=described.most,
        help=described.help,
        rich_help_panel=option.panel,
        show_default=shown or usual or True,
    )
    default = option.default
    if default is MISSING:
        default = inspect.Parameter.empty
    elif described.read is not None:
        default = None  # The field's own default applies.
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, declared],
    )
