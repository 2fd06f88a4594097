"""How long does a test wait for what has to come?  Longer than the slowest machine needs: it only ends a hang.

Nothing is measured by it, and no test that passes ever waits so long. pytest gives a test 300 s, and says less of why.
"""

from __future__ import annotations

PATIENCE_S = 240.0
