"""What `doctor` finds: one row a check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lmcache_cli.exit_codes import ExitCode

# Where several things are wrong, the one that the others follow from decides.
_BY_WEIGHT = (ExitCode.NO_STORE, ExitCode.TOO_NEW, ExitCode.UNSUPPORTED, ExitCode.DAMAGE, ExitCode.ERROR)


class Status(StrEnum):
    """Notes are worth knowing, warnings worth acting upon; problems decide the exit code."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. `exit_code` counts for a problem alone."""

    area: str
    check: str
    status: Status
    found: str
    next_step: str = ""
    exit_code: ExitCode = ExitCode.OK

    def row(self) -> dict[str, object]:
        """As `lmcache doctor` shows it."""
        return {
            "area": self.area,
            "check": self.check,
            "status": self.status,
            "found": self.found,
            "next_step": self.next_step or None,
        }


def exit_code_of(checks: Sequence[Check]) -> ExitCode:
    """0 where there is no problem, else the code of the weightiest one."""
    codes = {check.exit_code for check in checks if check.status is Status.PROBLEM}
    return next((code for code in _BY_WEIGHT if code in codes), ExitCode.OK)
