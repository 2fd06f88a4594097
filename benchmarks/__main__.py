"""Every benchmark, one after the other, each in a process of its own: ``python -m benchmarks``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NOT_BENCHMARKS = {"__init__", "__main__", "measure", "s3_server"}


def main() -> int:
    """Run all; return 1 if any failed."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in NOT_BENCHMARKS)
    failed = [name for name in names if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"]).returncode]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
