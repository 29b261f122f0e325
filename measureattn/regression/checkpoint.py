"""Checkpoints: plain arrays and one JSON text in a NumPy archive, written whole or not at all."""

import contextlib
import io
import json
import os
import secrets
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

TEXT = "json"  # the archive's member that holds everything but the arrays


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


def save(path: Path, tensors: dict[str, Tensor], rest: dict) -> None:
    """Write tensors and JSON-able `rest` to `path`, atomically; raises as `write_atomically`.

    See: chapter 10.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(Path(folder, "x.npz"), {"a": torch.ones(2)}, {"step": 3})
    ...     load(Path(folder, "x.npz"))
    ({'a': tensor([1., 1.])}, {'step': 3})
    """
    buffer = io.BytesIO()
    arrays = {name: tensor.numpy(force=True) for name, tensor in tensors.items()}
    np.savez(buffer, **arrays, **{TEXT: np.array(json.dumps(rest))})
    write_atomically(path, buffer.getvalue())


def load(path: Path) -> tuple[dict[str, Tensor], dict]:
    """What `save` wrote; nothing in the file is executed, and each array's checksum is verified.

    Raises ValueError if the file is damaged. See: chapter 10.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "x.npz").write_bytes(b"half")
    ...     load(Path(folder, "x.npz"))  # doctest: +ELLIPSIS, +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    ValueError: ...x.npz is not a whole checkpoint
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        rest = json.loads(str(arrays.pop(TEXT)))
    except (zipfile.BadZipFile, zlib.error, ValueError, KeyError, EOFError) as error:
        raise ValueError(
            f"{path} is not a whole checkpoint ({type(error).__name__}): it was cut off or written "
            f"by something else. Delete it, and the run starts anew; nothing else is lost"
        ) from error
    return {name: torch.from_numpy(array) for name, array in arrays.items()}, rest
