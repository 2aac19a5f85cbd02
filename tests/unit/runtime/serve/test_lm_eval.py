"""lm_eval completes a task: its log-likelihoods equal the toy model's definition."""

from __future__ import annotations

import json
import math
import random
import subprocess
import venv
from pathlib import Path

import pytest
from clients import openai_client
from serve.served import LETTERS, TEMPLATE, served, worded
from toy_model import target_logits

PROGRAM = Path(openai_client.__file__).parent / "lm_eval_client.py"
TASK = """
task: letters
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""


def score(text: str, choice: str) -> float:
    """Return the log-likelihood of a choice after a text."""
    ids = [LETTERS.index(letter) for letter in text + choice]
    total = 0.0
    for i in range(len(text), len(ids)):
        logits = [float(x) for x in target_logits(ids[:i])]
        total += logits[ids[i]] - math.log(sum(map(math.exp, logits)))
    return total


@pytest.mark.slow
def test_lm_eval_completes_a_task(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    installed = subprocess.run(
        [*install, "lm_eval[api]>=0.4.13,<0.5"], capture_output=True, text=True, check=False
    )
    if installed.returncode:
        pytest.skip(f"lm_eval cannot be installed here: {installed.stderr[-300:]}")
    run_task(python, tmp_path)


def run_task(python: Path, folder: Path) -> None:
    """Run the program and compare its scores."""
    drawn = random.Random(7)
    questions = [
        {
            "text": "".join(drawn.choices(LETTERS, k=drawn.randint(3, 20))),
            "choices": ["".join(drawn.choices(LETTERS, k=k)) for k in (1, 2, 3)],
            "label": drawn.randrange(3),
        }
        for _ in range(12)
    ]
    file = folder / "questions.jsonl"
    file.write_text("".join(f"{json.dumps(question)}\n" for question in questions))
    (folder / "task.yaml").write_text(TASK.format(file=file))
    with served(worded(TEMPLATE, max_seq_len=256)) as (url, _):
        done = subprocess.run(
            [python, PROGRAM, url, folder], capture_output=True, text=True, check=False, timeout=800
        )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    expected = [[score(q["text"], c) for c in q["choices"]] for q in questions]  # type: ignore[arg-type, attr-defined]
    for scores, row in zip(result["scores"], expected, strict=True):
        assert scores == pytest.approx(row, abs=1e-4)
    right = [row.index(max(row)) == q["label"] for row, q in zip(expected, questions, strict=True)]
    assert result["acc"] == pytest.approx(sum(right) / len(right))
