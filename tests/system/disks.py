"""A file system whose power can be cut: made in a file, mounted through a loop device, shut down without flushing.

The shutdown request (the same number for ext4 and XFS) makes the file system refuse all work at once and forget what
it had not yet written: dirty pages, and the journal in memory. After a remount, which replays the journal, one sees
what a machine would see whose power failed at that instant, with a disk that keeps what it has acknowledged.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

from tests.patience import PATIENCE_S

_SHUTDOWN = 0x8004587D  # _IOR('X', 125, u32): EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN
_WITHOUT_FLUSHING_THE_LOG = (2).to_bytes(4, "little")
_MAKE = {
    "ext4": (64, ["mkfs.ext4", "-q", "-F"]),
    "xfs": (320, ["mkfs.xfs", "-q", "-f"]),
}
_SYSTEM_PATH = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}


class Disk:
    """A small file system of ``kind`` ("ext4" or "xfs"), mounted at ``path`` until `close`."""

    def __init__(self, folder: Path, kind: str) -> None:
        size_mib, make = _MAKE[kind]
        self.kind = kind
        self.image = folder / f"{kind}.img"
        self.path = folder / kind
        with self.image.open("wb") as file:
            file.truncate(size_mib << 20)
        _run([*make, str(self.image)])
        self.path.mkdir()
        # Other tests start processes in mount namespaces of their own, which keep what is mounted now. What is mounted
        # in a shared folder is unmounted there, too: else the file system would live on, and stay shut down.
        self._folder = folder
        _run(["mount", "--bind", str(folder), str(folder)])
        _run(["mount", "--make-shared", str(folder)])
        self.cuts = 0
        self._mounted = False
        self.mount()

    def mount(self) -> None:
        _run(["mount", "-o", "loop", str(self.image), str(self.path)])
        self._mounted = True

    def cut_power(self) -> None:
        """From here on every call on the file system fails, and nothing more reaches the disk."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, _WITHOUT_FLUSHING_THE_LOG)
        finally:
            os.close(descriptor)
        self.cuts += 1

    def restart(self) -> None:
        """Mount again, as after the power came back. Nobody may have a file open."""
        self._unmount()
        self.mount()

    def close(self) -> None:
        if self._mounted:
            self._unmount()
        self.image.unlink(missing_ok=True)
        _run(["umount", str(self._folder)])

    def _unmount(self) -> None:
        _run(["umount", str(self.path)])
        self._mounted = False


def _run(command: list[str]) -> None:
    done = subprocess.run(command, env=_SYSTEM_PATH, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} failed ({done.returncode}): {done.stderr.strip() or done.stdout.strip()}: "
            "the system tests need root, loop devices, ext4 and XFS"
        )
