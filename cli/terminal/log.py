"""What the runtime logs, on standard error, for who debugs."""

from __future__ import annotations

import logging
import sys

from specbuild.cli.terminal.visible_text import visible

_LOG = logging.getLogger("specbuild")


class _Shown(logging.Handler):
    """Writes to what standard error is when a line comes."""

    def emit(self, record: logging.LogRecord) -> None:
        print(visible(self.format(record)), file=sys.stderr)


def show_log(asked: bool) -> None:
    """Log from now on, or no longer."""
    _LOG.handlers = [_Shown()] if asked else []
    _LOG.setLevel(logging.DEBUG if asked else logging.WARNING)
