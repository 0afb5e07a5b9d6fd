"""The operations on files in a bucket that `etils.epath` does not have. `mugrpo_jax.files` uses them."""

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Turn the errors of gcsfs and google-auth, which have types of their own, into an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(0, " ".join(str(error).split()) or type(error).__name__) from error


def create_object(path: Path, content: bytes) -> bool:
    """Create an object; return False if it exists. The storage service makes sure that only one succeeds."""
    return _upload_if(path, content, generation=0)


def replace_object(path: Path, old: bytes, new: bytes) -> bool:
    """Replace the content of an object; return False, and change nothing, if it is not `old` any more."""
    from google.api_core.exceptions import NotFound, PreconditionFailed

    found = _object(path)
    with plain_errors():
        try:
            found.reload()  # every upload gives an object another generation
            content = found.download_as_bytes(if_generation_match=found.generation)
        except (NotFound, PreconditionFailed):
            return False
    return content == old and _upload_if(path, new, generation=found.generation)


def _upload_if(path: Path, content: bytes, *, generation: int) -> bool:
    """Upload an object unless its generation is another one (0: unless there is an object)."""
    from google.api_core.exceptions import PreconditionFailed

    with plain_errors():
        try:
            _object(path).upload_from_string(content, if_generation_match=generation)
            return True
        except PreconditionFailed:
            # A request is sent again if the answer to it was lost. Then the object may be our own.
            with contextlib.suppress(FileNotFoundError):
                return path.read_bytes() == content
            return False


def _object(path: Path) -> Any:
    """Return the object with the client of Google, which can make an upload depend on the generation."""
    bucket, _, name = os.fspath(path).partition("://")[2].partition("/")
    return _client().bucket(bucket).blob(name)


@functools.cache
def _client() -> Any:
    from google.cloud import storage  # Orbax needs this package too

    return storage.Client()


def object_names(folder: Path) -> list[str]:
    """Return the names of all objects below a folder, relative to the folder, in order."""
    prefix = os.fspath(folder).partition("://")[2] + "/"
    with plain_errors():
        return sorted(name.removeprefix(prefix) for name in _storage().find(os.fspath(folder)))


def move_objects(folder: Path, target: Path) -> None:
    """Copy all objects below a folder inside the storage service, and delete them when all are copied."""
    names = object_names(folder)
    old, new = ([f"{os.fspath(place)}/{name}" for name in names] for place in (folder, target))
    with plain_errors():
        _storage().copy(old, new)
        _storage().rm(old)


def _storage() -> Any:
    """Return the file system of gcsfs, the same object that `etils.epath` uses."""
    import fsspec

    return fsspec.filesystem("gcs")
