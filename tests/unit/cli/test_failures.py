"""Every failure is reported in one line with the right exit code; a traceback needs --debug."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from specbuild.cli import main as command_line
from specbuild.cli.terminal import plot_file
from specbuild.cli.terminal.failures import TerminatedError, failure_of
from specbuild.runtime.errors import EngineFileError, SpecbuildError


def os_error(number: int, path: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (SpecbuildError("no such thing: do that"), 2, "no such thing: do that"),
        (EngineFileError("two\nlines"), 2, "two lines"),
        (typer.BadParameter("not so"), 2, "not so"),
        (os_error(errno.ENOSPC, "engine/weights"), 2, "engine/weights: No space left"),
        (os_error(errno.EDQUOT), 2, "free some space"),
        (os_error(errno.EACCES, "secret"), 2, "secret: Permission denied"),
        (os_error(errno.EROFS, "engine"), 2, "Read-only file system"),
        (MemoryError(), 2, "memory ran out"),
        (ModuleNotFoundError("no", name="torch.nn"), 2, "pip install '.[build]'"),
        (ModuleNotFoundError("no", name="onnxruntime"), 2, "pip install '.[cpu]'"),
        (ModuleNotFoundError("no", name="specbuild.lost"), 70, "internal error"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (TerminatedError(), 143, "terminated"),
        (ValueError("oh"), 70, "internal error (ValueError: oh)"),
        (os_error(errno.EINVAL), 70, "internal error"),
    ],
)
def test_messages_and_exit_codes_of_errors(error: BaseException, code: int, message: str) -> None:
    failure = failure_of(error)
    assert failure.exit_code == code
    assert message in failure.sentence
    assert "\n" not in failure.sentence


@pytest.mark.parametrize("error", [SpecbuildError("wrong"), ValueError("bug"), os_error(errno.EIO)])
@pytest.mark.parametrize("debug", [False, True])
def test_a_traceback_is_printed_with_debug_only(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    error: Exception,
    debug: bool,
) -> None:
    def fail(*_asked: object) -> None:
        raise error

    monkeypatch.setattr("specbuild.runtime.engine_dir.files.read_manifest", fail)
    arguments = ["check", str(tmp_path), *(["--debug"] if debug else [])]
    assert command_line.main(arguments) == failure_of(error).exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("Traceback" in captured.err) == debug
    assert captured.err.count("\n") == 1 or debug
    assert captured.err.splitlines()[-1].startswith("specbuild: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["nonsense"],
        ["run", "engine", "--nonsense"],
        ["run", "engine", "--max-new-tokens", "0"],
        ["run", "engine", "--max-new-tokens", "many"],
        ["run", "engine", "--draft-top-k", "-1"],
        ["run", "engine", "--temperature", "-1"],
        ["build", "--model", "x"],
        ["build", "--model", "x", "--output", "y", "--backend", "abacus"],
        ["build", "--model", "x", "--output", "y", "--max-seq-len", "0"],
        ["verify", "engine"],
        ["train", "draft", "--model", "x"],
        ["train", "nonsense"],
    ],
)
def test_usage_errors_are_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert command_line.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("specbuild: ")
    assert captured.err.count("\n") == 1


def test_an_interrupt_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_asked: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specbuild.runtime.engine_dir.files.read_manifest", interrupt)
    assert command_line.main(["check", "engine"]) == 130
    assert capsys.readouterr().err == "specbuild: interrupted\n"


def run_line(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        f"{sys.executable} -m specbuild.cli.main {line}",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["doctor", "--help", "--version"])
def test_a_full_output_is_reported_in_one_line(command: str) -> None:
    done = run_line(f"{command} > /dev/full")
    assert done.returncode == 2
    assert "No space left" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full"])
def test_the_exit_code_does_not_need_standard_error(where: str) -> None:
    if "full" in where and not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    refused = run_line(f"nonsense --debug {where}")
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", "")


def test_messages_escape_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_asked: object) -> None:
        raise SpecbuildError("engine \x1b]0;title\x07 \x9b2J is damaged")

    monkeypatch.setattr("specbuild.runtime.engine_dir.files.read_manifest", fail)
    assert command_line.main(["check", "engine", "--debug"]) == 2
    assert not set("\x1b\x07\x9b") & set(capsys.readouterr().err)


def test_a_closed_pipe_is_not_an_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m specbuild.cli.main doctor | true; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode in (0, 141)
    assert "Traceback" not in done.stderr


def test_help_needs_no_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["run", "--help"]) == 0
    assert "--draft-top-k" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["train"], ["retrofit"]])
def test_a_command_group_without_a_command_shows_its_help(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert command_line.main(words) == 0
    captured = capsys.readouterr()
    assert "Usage: specbuild" in captured.out and "Commands" in captured.out
    assert not captured.err


def test_completion_is_installed(tmp_path: Path) -> None:
    at_home = f"HOME={tmp_path} {sys.executable} -m specbuild.cli.main"
    script = f"{at_home} --install-completion && COMP_WORDS='specbuild ins' COMP_CWORD=1 "
    done = subprocess.run(
        f"{script} _SPECBUILD_COMPLETE=complete_bash {at_home}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "inspect")
    assert (tmp_path / ".bashrc").is_file()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["--version"]) == 0
    assert capsys.readouterr().out.strip()[0].isdigit()


def test_a_chart_without_matplotlib_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot_file, "find_spec", lambda _name: None)
    with pytest.raises(ModuleNotFoundError) as refused:
        plot_file.require_plot_place(tmp_path / "one.svg")
    failure = failure_of(refused.value)
    assert failure.exit_code == 2
    assert failure.sentence.startswith("package matplotlib is not installed: pip install")
    plot_file.require_plot_place(None)


def test_a_file_does_not_reuse_the_descriptor_of_a_closed_stream(tmp_path: Path) -> None:
    code = (
        "import os, sys; from specbuild.cli.main import main; main(['check', 'nowhere'])\n"
        "print('lost', file=sys.stderr, flush=True)\n"
        "assert os.open('kept', os.O_CREAT | os.O_WRONLY) > 2"
    )
    done = subprocess.run(
        f'exec {sys.executable} -c "{code}" <&- 2>&-',
        shell=True,
        cwd=tmp_path,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0
    assert (tmp_path / "kept").read_bytes() == b""


def test_messages_with_long_names_are_one_line() -> None:
    sentence = failure_of(SpecbuildError(f"{'x' * 100_000} is no tensor")).sentence
    assert len(sentence) < 5000 and sentence.endswith("is no tensor")
