"""This module notes, in a training process, which rows each step used: a line for each step, on disk at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path


def note(step: int, ids: Iterable[int], **facts: object) -> None:
    """Note that optimizer step ``step`` (counted from 1 over the whole run) used the rows ``ids`` on this rank.

    Call it after the optimizer has stepped, and before the step can be saved. ``facts`` are kept with it, such as a
    checksum of the weights. `Job` gives the folder and the number of the attempt by the environment.
    """
    folder, attempt = Path(os.environ["NOTES"]), os.environ["ATTEMPT"]
    rank = os.environ.get("RANK", "0")
    line = {"attempt": int(attempt), "step": step, "ids": [int(one) for one in ids], **facts}
    with (folder / f"{attempt}-{rank}-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
