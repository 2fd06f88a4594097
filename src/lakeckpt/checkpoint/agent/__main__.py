"""This module runs ``python -m lakeckpt.checkpoint.agent ASKED ANSWERS TRAINER``: an agent, for the calling trainer.

The arguments are numbers of inherited file descriptors; see `lakeckpt.checkpoint.agent.process`.
"""

import os
import sys

from lakeckpt.checkpoint.agent.process import main

if __name__ == "__main__":
    status = main(*map(int, sys.argv[1:4]))
    os._exit(status)  # a thread that waits for a silent store must not keep the process
