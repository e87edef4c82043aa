"""What can go wrong between a name and its bytes.

    BackendError
    ├── BadName         the name breaks the grammar of names; nothing was touched
    ├── NotFound        surely no such object
    ├── AlreadyExists   put: the name is taken; the object that was there stays
    ├── VersionChanged  delete: another object stands under the name now; it stays
    ├── ShortRead       the object ends before the range asked for does
    ├── NoSpace         the device or the quota is full; nothing was published
    ├── Unsupported     this back-end cannot do that
    └── Unavailable     unknown: time-out, 5xx, EIO, EACCES. Nothing may be concluded, nothing deleted
        ├── Obstructed  something that is no object stands at the name (directory, symbolic link, device)
        ├── RootChanged the store's directory went away or was replaced under an open back-end
        └── CircuitOpen not tried: the back-end failed too often a moment ago

`Unavailable.transient` says whether trying again can help: not for its three subclasses, nor for refused permissions.
"""

from __future__ import annotations


class BackendError(Exception):
    """Root of every error a back-end raises; `name` is the object concerned, where there is one.

    `next_step` says what would help, where that is known: refused permissions, missing credentials or packages.
    """

    def __init__(self, message: str, *, name: str | None = None, next_step: str = "") -> None:
        super().__init__(message)
        self.name = name
        self.next_step = next_step


class BadName(BackendError):
    """The name is refused: it must be relative, of components `[a-z0-9._-]`, at most 255 bytes, not `.` or `..`."""


class NotFound(BackendError):
    """Surely absent: the back-end answered, and there is no such object."""


class AlreadyExists(BackendError):
    """The name is taken, by another writer or by our own put whose answer was lost; the object there is unchanged."""


class VersionChanged(BackendError):
    """The object under the name is not the version that was to be deleted; it was left in place."""


class ShortRead(BackendError):
    """The range reaches past the end of the object; the buffers hold unspecified bytes."""


class NoSpace(BackendError):
    """Device full or quota reached; nothing was published and the staging was removed."""


class Unsupported(BackendError):
    """The back-end lacks the capability."""


class Unavailable(BackendError):
    """The state of the object is unknown. Treat as a miss when reading, give up when deleting."""

    def __init__(self, message: str, *, name: str | None = None, transient: bool = True, next_step: str = "") -> None:
        super().__init__(message, name=name, next_step=next_step)
        self.transient = transient


class Obstructed(Unavailable):
    """Something that is no object stands at the name or above it; `move` can quarantine it."""

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message, name=name, transient=False)


class RootChanged(Unavailable):
    """The directory that was opened is gone or another one stands in its place; open the store again."""

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message, name=name, transient=False)


class CircuitOpen(Unavailable):
    """Refused without trying, because recent calls failed; tried again after the cool-down."""

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message, name=name, transient=False)
