"""The most memory that this process has had, as the kernel counted it.

`ru_maxrss` will not do: a process starts with what its parent had in memory, so a test run that is large itself
makes every program that it starts look as large.
"""

from __future__ import annotations

from pathlib import Path

_SELF = Path("/proc/self")


def peak_bytes() -> int:
    """High-water mark of resident memory since the start of the program, or since `forget_peak()`."""
    status = (_SELF / "status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Lower the mark to what is resident now (`5` in `clear_refs`, proc(5))."""
    (_SELF / "clear_refs").write_text("5")
