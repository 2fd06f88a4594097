"""Every benchmark, one after the other, each in a process of its own: ``python -m benchmarks [NAME …] [-- OPTION …]``.

Names choose some of them; options after ``--`` go to each that is run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NOT_BENCHMARKS = {"__main__", "s3_server"}
IS_RUN = 'if __name__ == "__main__":'


def names() -> list[str]:
    """All benchmarks: modules, and packages that can be run."""
    here = Path(__file__).parent
    modules = {path.stem for path in here.glob("*.py") if IS_RUN in path.read_text()} - NOT_BENCHMARKS
    return sorted(modules | {path.parent.name for path in here.glob("*/__main__.py")})


def main() -> int:
    """Run those that are named, or all; return 1 if any failed."""
    asked, options = sys.argv[1:], []
    if "--" in asked:
        at = asked.index("--")
        asked, options = asked[:at], asked[at + 1 :]
    unknown = sorted(set(asked) - set(names()))
    if unknown:
        print(f"no benchmark {', '.join(unknown)}: there are {', '.join(names())}", file=sys.stderr)
        return 2
    failed = [
        name
        for name in asked or names()
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *options]).returncode
    ]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
