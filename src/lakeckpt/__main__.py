"""``python -m lakeckpt``: the command ``lakeckpt``."""

from __future__ import annotations

import sys

from lakeckpt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
