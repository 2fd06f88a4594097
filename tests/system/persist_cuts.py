"""Persists two cuts of an arena, one after the other, as an agent does, and says on a socket which are committed.

Run under strace by ``test_agent_faults``. Usage: ``persist_cuts.py ROOT ARENAS SOCKET_DESCRIPTOR``. Loads no torch.
"""

from __future__ import annotations

import json
import socket
import sys

from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.tracking.waiting import SystemWaiter
from tests.checkpoint.agent.rig import Desk

STEPS = (1, 2)


def main(root: str, arenas: str, descriptor: int) -> int:
    says = socket.socket(fileno=descriptor)
    desk = Desk(LocalStorage(root), arenas, SystemWaiter())
    desk.persister.start()
    for number, step in enumerate(STEPS):
        desk.order(step, number)
        desk.settled.wait()
        desk.settled.clear()
        says.send(json.dumps({"step": step, "error": desk.outcomes[-1].text}).encode())
    desk.persister.leave()
    desk.persister.join()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
