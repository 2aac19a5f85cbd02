"""Makes docs/serve-page.png: the page of a running server, as Chromium shows it.

specbuild serve "$(python examples/smollm2/fetch_model.py)" --served-model-name SmolLM2-135M, then
PYTHONPATH=tests python docs/photograph_page.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from browser import Browser, browser

PROMPT = "Write a Python function that reverses a string."
PICTURE = Path(__file__).with_name("serve-page.png")


def converse(page: Browser, url: str) -> None:
    """Sends the prompt twice, and waits for the answers and for a few points of the plots."""
    page.open(url)
    page.until("document.getElementById('state').textContent === 'ready'")
    for name, value in (("temperature", "0"), ("max_tokens", "96")):
        page.value(f"document.getElementById('{name}').value = {value!r}")
    for _ in range(2):  # the first answer finds a cold engine
        page.value("document.getElementById('new').click()")
        page.type(PROMPT)
        page.press("Enter")
        page.until("document.querySelector('.turn.assistant .note') !== null", seconds=120)
    page.until("document.querySelector('.plot output').textContent === '0'")


def main() -> None:
    """Writes the picture, and its dark twin where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--output", type=Path, default=PICTURE)
    parser.add_argument("--width", type=int, default=1100)
    parser.add_argument("--height", type=int, default=680)
    parser.add_argument("--dark", action="store_true")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        browser(Path(profile)) as page,
    ):
        page.look(args.width, args.height, dark=args.dark)
        converse(page, args.url)
        page.screenshot(args.output)


if __name__ == "__main__":
    main()
