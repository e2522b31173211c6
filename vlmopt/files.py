"""Writing files so that a kill in the middle leaves the previous content whole."""

import os
import tempfile
from pathlib import Path

from vlmopt.errors import VlmoptError


def require_writable(path: str | Path) -> None:
    """Make the folder of the file `path` and try to write there, so that long work is not done in vain.

    Raises:
        VlmoptError: the folder cannot be written.
    """
    folder = Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise VlmoptError(
            f"{path} cannot be written ({error.strerror or error}); choose another output path"
        ) from error


def write_atomic(path: str | Path, content: str | bytes) -> Path:
    """Write `content` to `path` through a temporary file beside it and a rename.

    Raises:
        VlmoptError: the folder cannot be written.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        raise VlmoptError(f"cannot write {path} ({error.strerror or error}); choose another output path") from error
    return path
