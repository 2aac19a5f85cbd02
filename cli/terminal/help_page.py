"""The layout of ``--help``."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from specbuild.cli.options.shared import GENERAL


def show_help_alone(context: Any) -> None:
    """The help of a group of commands, if none of them is named."""
    if context.invoked_subcommand is None:
        print(context.get_help(), end="")


class Command(TyperCommand):
    """A command whose help is readable at 80 columns: no name of an option is cut."""

    def get_help_option(self, ctx: Any) -> Any:
        """Put ``--help`` after ``--debug``, at the end."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.rich_help_panel = GENERAL
        return option

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help; paragraphs are wrapped to the terminal, not as in the source.

        Empty columns, such as short names, take one character instead of two.
        """
        from typer import rich_utils

        rich_utils.STYLE_OPTIONS_TABLE_PADDING = (0, 1, 0, 0)  # type: ignore[assignment]
        written, self.help = self.help, unwrapped(self.help or "")
        try:
            super().format_help(ctx, formatter)
        finally:
            self.help = written


def unwrapped(text: str) -> str:
    """Return a docstring with each paragraph on one line; examples (after ``\\b``) stay."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(p if "\b" in p else p.replace("\n", " ") for p in paragraphs)
