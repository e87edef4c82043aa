"""Runs a function in a forked child and kills it at the n-th system-call boundary (ptrace; Linux, any 64-bit CPU).

Every system call has two boundaries: at the first the call has not happened, at the second it has. SIGKILL at the
first keeps the kernel from making the call.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Container
from dataclasses import dataclass

_TRACEME, _SYSCALL, _SETOPTIONS, _GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E
_OPTIONS = 0x01 | 0x100000  # TRACESYSGOOD, EXITKILL
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_ENTRY = 1
_INFO_BYTES = 88

CHANGES_BY_MACHINE: dict[str, frozenset[int]] = {
    # write, pwrite64, fsync, fdatasync, truncate, ftruncate, rename, mkdir, rmdir, link, unlink, openat, mkdirat,
    # unlinkat, renameat, linkat, fallocate, pwritev, renameat2, pwritev2
    "x86_64": frozenset((1, 18, 74, 75, 76, 77, 82, 83, 84, 86, 87, 257, 258, 263, 264, 265, 285, 296, 316, 328)),
    "aarch64": frozenset((64, 68, 82, 83, 45, 46, 56, 34, 35, 38, 37, 47, 70, 276, 287)),
}
"""System calls that can change what lies on a disk: between two of them every moment to die is the same."""


@dataclass(frozen=True, slots=True)
class Traced:
    """How the child ended: killed, or by itself with `exit_code`; `boundaries` passed, as numbers of system calls."""

    exit_code: int | None
    boundaries: tuple[int, ...]


class NoTracing(OSError):
    """This machine does not let a process trace its child."""


def run_traced(child: Callable[[], None], kill_at: int | None, only: Container[int] | None = None) -> Traced:
    """Fork, run `child`, kill it when boundary `kill_at` (from 1) is reached.

    `only` names the system calls whose boundaries count; all do by default. The child must not start threads.
    """
    pid = os.fork()
    if pid == 0:
        _be_traced(child)
    os.waitpid(pid, 0)
    _ptrace(_SETOPTIONS, pid, 0, _OPTIONS)
    boundaries: list[int] = []
    number = -1
    deliver = 0
    while True:
        _ptrace(_SYSCALL, pid, 0, deliver)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            return Traced(os.WEXITSTATUS(status), tuple(boundaries))
        if os.WIFSIGNALED(status):
            raise RuntimeError(f"the traced child died of signal {os.WTERMSIG(status)} by itself")
        deliver = 0
        if os.WSTOPSIG(status) != _SYSCALL_STOP:
            deliver = os.WSTOPSIG(status)
            continue
        entered = _entered_syscall(pid)
        number = number if entered is None else entered
        if only is not None and number not in only:
            continue
        boundaries.append(number)
        if len(boundaries) == kill_at:
            os.kill(pid, signal.SIGKILL)
            while not os.WIFSIGNALED(status):
                _, status = os.waitpid(pid, 0)
            return Traced(None, tuple(boundaries))


def _be_traced(child: Callable[[], None]) -> None:
    code = 99
    try:
        _ptrace(_TRACEME, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        child()
        code = 0
    except BaseException as error:
        os.write(2, f"the traced child failed: {error!r}\n".encode())
    finally:
        os._exit(code)


def _entered_syscall(pid: int) -> int | None:
    """The number of the call that is being entered; None at the end of a call."""
    info = (ctypes.c_uint8 * _INFO_BYTES)()
    _ptrace(_GET_SYSCALL_INFO, pid, _INFO_BYTES, ctypes.addressof(info))
    if info[0] != _ENTRY:
        return None
    return int.from_bytes(bytes(info[24:32]), "little")


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_LIBC.ptrace.restype = ctypes.c_long


def _ptrace(request: int, pid: int, address: int, data: int) -> None:
    if _LIBC.ptrace(request, pid, address, data) < 0:
        code = ctypes.get_errno()
        raise NoTracing(code, f"ptrace request {request:#x}: {os.strerror(code)}")
