"""Checkpoints: plain arrays and one JSON text in a NumPy archive, written whole or not at all."""

import io
import json
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from measureattn._files import write_atomically

TEXT = "json"  # the archive's member that holds everything but the arrays


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
