"""Puts objects into a local storage, one after the other, and says on a socket which calls have returned.

Run under strace by ``test_syscall_faults``. Usage: ``write_objects.py ROOT SOCKET_DESCRIPTOR``. The socket, since the
test makes ``write`` fail as well. It ends with status 3 where a put failed, after saying why.
"""

from __future__ import annotations

import json
import socket
import sys

from lakeckpt.errors import StorageError
from lakeckpt.lake.storage.local import LocalStorage

PUTS = [
    ("put", "objects/1/a.bin", "a" * 9000),
    ("put_new", "log/1.lkc", "first"),
    ("put", "objects/1/a.bin", "b" * 5000),
    ("put_new", "log/2.lkc", "second"),
]


def main(root: str, descriptor: int) -> int:
    says = socket.socket(fileno=descriptor)
    storage = LocalStorage(root)
    for i, (method, key, text) in enumerate(PUTS):
        try:
            if method == "put":
                storage.put(key, [text.encode()])
            else:
                storage.put_new(key, text.encode())
        except StorageError as error:
            says.send(json.dumps({"failed": i, "errno": error.errno, "message": str(error)}).encode())
            return 3
        says.send(json.dumps({"returned": i}).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
