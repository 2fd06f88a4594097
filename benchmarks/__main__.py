"""Runs every benchmark, one after the other: ``python -m benchmarks [NAME ...]``.

A benchmark is a script of this folder whose name does not begin with an underscore; it says in its docstring what it
measures, against what, and prints ratios. Each runs in a process of its own, so that none warms another's caches.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent


def main(names: list[str]) -> int:
    scripts = {path.stem: path for path in sorted(_HERE.glob("[a-z]*.py"))}
    unknown = [name for name in names if name not in scripts]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}: there are {', '.join(scripts)}", file=sys.stderr)
        return 2
    failed = []
    for name in names or scripts:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, str(scripts[name])]).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
