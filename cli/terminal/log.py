"""The runtime's log on standard error, for debugging."""

from __future__ import annotations

import logging
import sys

from specbuild.cli.terminal.visible_text import visible

_LOG = logging.getLogger("specbuild")


class _StandardErrorHandler(logging.Handler):
    """Writes to the current standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        print(visible(self.format(record)), file=sys.stderr)


def show_log(is_enabled: bool) -> None:
    """Enable or disable the log."""
    _LOG.handlers = [_StandardErrorHandler()] if is_enabled else []
    _LOG.setLevel(logging.DEBUG if is_enabled else logging.WARNING)
