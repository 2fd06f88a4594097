"""``python -m lakeckpt.checkpoint.agent FOLDER DIGEST [LINGER_S]``: the agent of a run on this node.

Trainers start it.
"""

import os
import sys

from lakeckpt.checkpoint.agent.server import LINGER_S, main

if __name__ == "__main__":
    status = main(sys.argv[1], sys.argv[2], linger_s=float(sys.argv[3]) if len(sys.argv) > 3 else LINGER_S)
    sys.stderr.flush()
    os._exit(status)  # threads that wait for a silent store or trainer must not keep the process
