"""Makes docs/report-page.png: a part of a page that specbuild report wrote, as Chromium shows it.

specbuild report engine speed.json --output report.html, then
PYTHONPATH=tests python docs/photograph_report.py report.html
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from browser import browser

PICTURE = Path(__file__).with_name("report-page.png")


def main() -> None:
    """Writes the picture, and its dark twin where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--section", default="result")
    parser.add_argument("--output", type=Path, default=PICTURE)
    parser.add_argument("--width", type=int, default=820)
    parser.add_argument("--height", type=int, default=760)
    parser.add_argument("--dark", action="store_true")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        browser(Path(profile)) as page,
    ):
        page.look(args.width, args.height, dark=args.dark)
        page.open(args.report.resolve().as_uri())
        place = f"document.getElementById({args.section!r}).offsetTop - 12"
        page.value(f"window.scrollTo(0, {place})")
        page.screenshot(args.output)


if __name__ == "__main__":
    main()
