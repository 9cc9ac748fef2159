"""Files that are whole under their name or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_xmod.errors import UserError


def write_atomically(path: Path | str, content: str | bytes) -> None:
    """Writes a small file whole: readers see the old one or the new one.

    Raises:
        UserError: it can't be written (the disk is full, say); the old file is then untouched.
    """
    file = PendingFile(path)
    try:
        file.write(content.encode() if isinstance(content, str) else content)
        file.seal()
        file.publish()
    finally:
        file.discard()


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an operating-system error while writing `path` into a UserError that says what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}. Files that were there before are unchanged; "
            "free some space or choose another output, then run again"
        ) from error


class PendingFile:
    """A binary file written under a temporary name in the folder of `path`.

    Call `write` as often as needed, then `seal` (everything on disk, nothing visible yet), then `publish` (atomic
    rename). `discard` removes the temporary file and does nothing after `publish`.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        with write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(self.temporary, "wb", buffering=1 << 20)

    def write(self, data) -> None:
        """Append a bytes-like object."""
        with write_errors(self.path):
            self._stream.write(data)

    def seal(self) -> None:
        """Bring all bytes to disk and close the temporary file."""
        with write_errors(self.path):
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()

    def publish(self) -> None:
        """Give the sealed file its name, replacing an older one at once."""
        with write_errors(self.path):
            os.replace(self.temporary, self.path)
            sync_folder(self.path.parent)

    def discard(self) -> None:
        """Remove the temporary file; for the way out after an error."""
        with suppress(OSError):
            self._stream.close()  # flushes, which fails again on a full disk
        self.temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flushes a folder's list of names, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
