"""What kind of place a directory is: its file system, its room, and whether the page cache can be passed by."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from lmcache_cli.backends.buffers import BLOCK_BYTES
from lmcache_cli.backends.local.backend import LocalBackend

NETWORK_FILE_SYSTEMS = frozenset({"9p", "afs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"})
VOLATILE_FILE_SYSTEMS = frozenset({"ramfs", "tmpfs"})
_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Place:
    """`file_system` is empty where the kernel does not tell; `free_inodes` None where there is no fixed number."""

    file_system: str
    size_bytes: int
    free_bytes: int
    free_inodes: int | None

    @property
    def is_network(self) -> bool:
        return self.file_system in NETWORK_FILE_SYSTEMS or self.file_system.startswith("fuse.")

    @property
    def is_volatile(self) -> bool:
        """True where everything is gone after a restart of the machine."""
        return self.file_system in VOLATILE_FILE_SYSTEMS


def place_of(backend: LocalBackend) -> Place:
    """The place of a store. Raises OSError where it cannot be looked at."""
    room = os.statvfs(backend.path)
    return Place(
        file_system=_file_system(Path(backend.path).stat().st_dev),
        size_bytes=room.f_blocks * room.f_frsize,
        free_bytes=room.f_bavail * room.f_frsize,
        free_inodes=room.f_favail if room.f_files else None,
    )


def reads_directly(backend: LocalBackend, name: str) -> bool:
    """Whether the first block of an object can be read past the page cache."""
    try:
        fd = os.open(f"{backend.path}/{name}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as block:  # on a page of its own, as direct I/O wants it
            return os.preadv(fd, [block], 0) == BLOCK_BYTES
    except OSError:
        return False
    finally:
        os.close(fd)


def _file_system(device: int) -> str:
    """The type of the last mount of a device, as /proc tells it."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    found = ""
    try:
        lines = _MOUNTS.read_bytes().splitlines()
    except OSError:
        return found
    for line in lines:
        left, _, right = line.decode("ascii", "replace").partition(" - ")
        fields = left.split(" ")
        if len(fields) > 2 and fields[2] == wanted:
            found = right.split(" ")[0]
    return found
