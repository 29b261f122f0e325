"""Files that are whole or not there, whatever stops the writer."""

import contextlib
import os
import secrets
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by a file with `content`: a reader finds the old one or the new one, whole.

    Raises OSError, with one line that names the file, if the folder cannot be written or the disk
    is full; what was there before stays. See: chapter 10.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(Path(folder, "x"), b"whole")
    ...     Path(folder, "x").read_bytes()
    b'whole'
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(fresh, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        raise OSError(
            error.errno,
            f"could not write {path}: {error.strerror}. What was there before is untouched; make "
            f"room or choose a folder you may write to, then run the same command again",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not every file system lets a folder be synchronised
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
