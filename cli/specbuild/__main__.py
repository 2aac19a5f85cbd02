"""``python -m specbuild`` is the ``specbuild`` command."""

import sys

from specbuild.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
