"""Why a reader refuses an object: the classes that SPEC §8.5, §10, §11 and §13 tell apart.

What to do differs: damage is quarantined, a later release's object is left alone, the others are ignored and reported.
"""

from __future__ import annotations

import enum


class Reason(enum.Enum):
    """Class of a refusal."""

    DAMAGE = "damage"
    LATER = "of a later release"
    NOT_OURS = "not ours"
    WRONG_PLACE = "sound, in a wrong place"
    BAD_NAME = "a path that does not parse"


class Refused(Exception):
    """One object was refused; `step` is the number of the check in SPEC §8.5 for shards, 0 for everything else.

    `checksum` tells damage that only a checksum shows from damage that the structure shows.
    """

    def __init__(self, reason: Reason, text: str, step: int = 0, checksum: bool = False) -> None:
        super().__init__(f"{reason.value}: {text[:200]}")
        self.reason = reason
        self.step = step
        self.checksum = checksum


def damaged(text: str, step: int = 0, checksum: bool = False) -> Refused:
    """The refusal of bytes that are not what their writer wrote, or break a rule."""
    return Refused(Reason.DAMAGE, text, step, checksum)


def later(text: str, step: int = 0) -> Refused:
    """The refusal of what only a later release can know."""
    return Refused(Reason.LATER, text, step)
