"""Write the tables of which kernel runs into docs/developers/cuda-kernels.md.

.venv/bin/python docs/write_dispatch.py
"""

from __future__ import annotations

import re
from pathlib import Path

from specbuild.plugins_cuda.dispatch import markdown_lines
from specbuild.plugins_cuda.mla_attention import dispatch as latents
from specbuild.plugins_cuda.paged_tree_attention import dispatch as attention

FILE = Path(__file__).with_name("developers") / "cuda-kernels.md"
TABLES = {
    "paged_tree_attention": lambda: markdown_lines(attention.TABLE),
    "mla_attention": lambda: markdown_lines(latents.TABLE),
}
_PLACE = re.compile(
    r"(<!-- dispatch (\w+): make docs -->\n\n).*?(\n<!-- end of dispatch -->)", re.DOTALL
)


def page(text: str) -> str:
    """The page with every table as the code has it."""
    return _PLACE.sub(
        lambda place: place[1] + "".join(f"{line}\n" for line in TABLES[place[2]]()) + place[3],
        text,
    )


if __name__ == "__main__":
    FILE.write_text(page(FILE.read_text(encoding="utf-8")), encoding="utf-8")
