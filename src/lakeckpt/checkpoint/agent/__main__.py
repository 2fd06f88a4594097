"""This module runs ``python -m lakeckpt.checkpoint.agent TRAINER``: an agent, for the calling trainer.

The argument is the number of an inherited file descriptor; see `lakeckpt.checkpoint.agent.process`.
"""

import os
import sys

from lakeckpt.checkpoint.agent.process import main

if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    os._exit(status)  # a thread that waits for a silent store must not keep the process
