"""The ``specbuild`` command."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Annotated

import typer

from specbuild.cli.options.shared import Invocation
from specbuild.cli.options.vllm_flags import serve_words
from specbuild.cli.terminal.failures import (
    EXIT_BROKEN_PIPE,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    failure_of,
)
from specbuild.cli.terminal.help_page import Command, show_help_alone
from specbuild.cli.terminal.process import fill_closed_streams, sigterm_raised
from specbuild.cli.terminal.visible_text import visible

# The module of each command or group of commands. Only the requested one is imported.
_COMMANDS = {
    "build": "specbuild.cli.commands.build",
    "run": "specbuild.cli.commands.run",
    "chat": "specbuild.cli.commands.chat",
    "serve": "specbuild.cli.commands.serve",
    "dynamo": "specbuild.cli.commands.dynamo",
    "inspect": "specbuild.cli.commands.inspect",
    "check": "specbuild.cli.commands.check",
    "doctor": "specbuild.cli.commands.doctor",
    "selftest": "specbuild.cli.commands.selftest",
    "verify": "specbuild.cli.commands.verify",
    "bench": "specbuild.cli.bench.command",
    "compare": "specbuild.cli.commands.compare",
    "estimate": "specbuild.cli.commands.estimate",
    "report": "specbuild.cli.commands.report",
    "tune": "specbuild.cli.commands.tune",
    "synth": "specbuild.cli.commands.synth",
    "sign": "specbuild.cli.commands.sign",
    "cache": "specbuild.cli.commands.cache",
    "train": "specbuild.cli.commands.train",
    "retrofit": "specbuild.cli.commands.retrofit",
}
# Deprecated names, accepted until 0.3.
_RENAMED_COMMANDS = {"plan": "estimate"}
# `bench ENGINE --sweep PHASES` is `bench sweep ENGINE PHASES` now, and without such an option
# `bench pairs ENGINE`.
_BENCH_COMMANDS = {
    "--server": "server",
    "--modes": "modes",
    "--drafters": "drafters",
    "--suite": "suite",
    "--sweep": "sweep",
}
_RENAMED_OPTIONS = {"--screen-head": "--prefilter-head"}  # as in builder/option_group.py


def command_line(command_name: str | None = None) -> typer.Typer:
    """Return all commands, or only the ``command_name`` one if it exists.

    Importing all commands, and typer's processing of their options, takes longer than ``specbuild
    check``.
    """
    app = typer.Typer(
        name="specbuild",
        help="Compile checkpoints into engine directories and run them with speculative decoding.",
        invoke_without_command=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_specbuild)
    for name in [command_name] if command_name in _COMMANDS else _COMMANDS:
        command = getattr(import_module(_COMMANDS[name]), name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(cls=Command)(command)
    return app


def _show_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(version("specbuild"))
        raise typer.Exit


def _specbuild(
    context: typer.Context,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_show_version, is_eager=True, help="Show version."
        ),
    ] = False,
) -> None:
    show_help_alone(context)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code."""
    invocation = Invocation()
    fill_closed_streams()
    if sys.stdout is None:
        _print_error("there is no standard output to write to")
        return EXIT_USER_ERROR
    for stream in (sys.stdout, sys.stderr):
        # Tables and messages have characters that some encodings lack.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        words = _current_names(list(sys.argv[1:] if arguments is None else arguments))
        with sigterm_raised():
            result = command_line(words[0] if words else None)(
                args=words,
                prog_name="specbuild",
                standalone_mode=False,
                obj=invocation,
            )
            sys.stdout.flush()
    except SystemExit as left:
        # typer exits itself after showing or installing completion, and if a reader such as `head`
        # closed the pipe.
        return _leave_pipe() if left.code else 0
    except BaseException as error:
        return _report(error, invocation.debug)
    exit_code = result if isinstance(result, int) else 0
    if exit_code == EXIT_INTERRUPTED:
        return _report(KeyboardInterrupt(), invocation.debug)
    return exit_code


def _current_names(words: list[str]) -> list[str]:
    """Return the words of a command line without deprecated names; warn for each of them."""
    if words and words[0] in _RENAMED_COMMANDS:
        current = _RENAMED_COMMANDS[words[0]]
        _print_error(f"warning: {words[0]} is deprecated; use {current}")
        words = [current, *words[1:]]
    if words[:1] == ["bench"]:
        words = _bench_words(words)
    if words[:1] == ["serve"]:
        translated, notes = serve_words(words[1:])
        words = ["serve", *translated]
        for note in notes:
            _print_error(note)
    for old in _RENAMED_OPTIONS.keys() & set(words):
        _print_error(f"warning: {old} is deprecated; use {_RENAMED_OPTIONS[old]}")
    return [_RENAMED_OPTIONS.get(word, word) for word in words]


def _bench_words(words: list[str]) -> list[str]:
    """Return the words of ``bench`` with one of its commands, from the spelling of 0.1."""
    commands = {"pairs", *_BENCH_COMMANDS.values()}
    if len(words) == 1 or words[1] in commands | {"-h", "--help"}:
        return words
    rest, option, name = words[1:], "ENGINE", "pairs"
    values: list[str] = []
    for place, word in enumerate(rest):
        option_of_word, has_value, value = word.partition("=")
        if option_of_word in _BENCH_COMMANDS:
            option, name = option_of_word, _BENCH_COMMANDS[option_of_word]
            takes_value = name != "drafters" and not has_value
            values = [value] if has_value else rest[place + 1 : place + 1 + takes_value]
            rest = rest[:place] + rest[place + 1 + takes_value :]
            break
    _print_error(f"warning: bench {option} is deprecated; use bench {name}")
    return ["bench", name, *rest, *values]


def _report(error: BaseException, debug: bool) -> int:
    if isinstance(error, BrokenPipeError):
        return _leave_pipe()
    failure = failure_of(error)
    if debug:
        _write("".join(traceback.format_exception(error)))
    if failure.sentence:
        _print_error(failure.sentence)
    _drop_unwritten_output()
    return failure.exit_code


def _print_error(sentence: str) -> None:
    _write(f"specbuild: {sentence}\n")


def _write(text: str) -> None:
    """Print to standard error as far as possible; if it is full, the exit code remains."""
    with suppress(OSError):
        sys.stderr.write(visible(text))
        sys.stderr.flush()


def _leave_pipe() -> int:
    _drop_unwritten_output()
    return EXIT_BROKEN_PIPE


def _drop_unwritten_output() -> None:
    """Prevent a second failure in the interpreter's final flush after writing has failed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
