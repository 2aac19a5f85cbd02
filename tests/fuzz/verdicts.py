"""What became of a mutant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specbuild.cli.terminal.failures import EXIT_USER_ERROR, failure_of

# A clean refusal; the output of the original; another engine, whole in itself; a defect.
REFUSED, SAME, OTHER, FINDING = "refused", "same", "other", "finding"
VERDICTS = (REFUSED, SAME, OTHER, FINDING)
_LONGEST_SENTENCE = 4100
_SHOWN = 400


@dataclass(frozen=True)
class Verdict:
    """One of VERDICTS, with the sentence of a refusal or what is wrong."""

    verdict: str
    reason: str = ""


class ContradictionError(Exception):
    """What a target found wrong by itself."""


def judged(
    run: Callable[[], Any], expected: Any, may_differ: Callable[[Any, Any], bool]
) -> Verdict:
    """The verdict on what ``run`` gives, against what the original gave."""
    try:
        output = run()
    except ContradictionError as error:
        return Verdict(FINDING, str(error))
    except BaseException as error:
        return _failed(error)
    if output == expected:
        return Verdict(SAME)
    if may_differ(output, expected):
        return Verdict(OTHER)
    return Verdict(FINDING, f"wrong output: {output!r:.150} for {expected!r:.150}")


def _failed(error: BaseException) -> Verdict:
    if isinstance(error, KeyboardInterrupt):
        raise error
    failure = failure_of(error)
    said = failure.sentence[:_SHOWN]
    if failure.exit_code != EXIT_USER_ERROR:
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        file = "" if place is None else place.tb_frame.f_code.co_filename.rpartition("/")[2]
        line = 0 if place is None else place.tb_lineno
        return Verdict(FINDING, f"exit {failure.exit_code} at {file}:{line}: {said}")
    if not said.strip() or len(failure.sentence) > _LONGEST_SENTENCE:
        return Verdict(FINDING, f"no sentence but {len(failure.sentence)} characters: {said}")
    return Verdict(REFUSED, said)
