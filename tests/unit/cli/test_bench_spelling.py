"""The syntax of ``bench`` in 0.1, which is translated to its commands until 0.3."""

from __future__ import annotations

import pytest

from specbuild.cli.main import _current_names


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("engine --prompts a.jsonl", "pairs engine --prompts a.jsonl"),
        ("engine --against a.json --json", "pairs engine --against a.json --json"),
        ("engine --sweep decode,spec --batch 1", "sweep engine --batch 1 decode,spec"),
        ("--sweep=anatomy engine", "sweep engine anatomy"),
        ("engine --suite smoke --junit s.xml", "suite engine --junit s.xml smoke"),
        ("--modes base,dsa --text t", "modes --text t base,dsa"),
        ("engine --drafters --batch 2", "drafters engine --batch 2"),
        ("--server http://a:1 --clients 2", "server --clients 2 http://a:1"),
        ("engine --sweep", "sweep engine"),
    ],
)
def test_the_old_syntax_is_translated(
    old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _current_names(["bench", *old.split()]) == ["bench", *new.split()]
    warning = capsys.readouterr().err
    assert warning.startswith("specbuild: warning: bench ") and warning.count("\n") == 1
    assert f"use bench {new.split(maxsplit=1)[0]}" in warning


@pytest.mark.parametrize("words", ["", "--help", "pairs engine", "sweep engine decode"])
def test_current_commands_are_not_translated(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _current_names(["bench", *words.split()]) == ["bench", *words.split()]
    assert capsys.readouterr().err == ""
