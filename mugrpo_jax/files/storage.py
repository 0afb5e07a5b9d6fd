"""Files that survive a SIGKILL, on a local disk and on Google Cloud Storage (`gs://bucket/folder`).

A local file is written under a temporary name and renamed. An object in a bucket can neither be renamed nor
appended to. But it appears or changes all at once, when its upload is complete, so it is written directly.
All differences between the two kinds of storage are in this room. Other modules get their paths from
`to_path`.
"""

import atexit
import contextlib
import errno
import fcntl
import functools
import importlib.util
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

from mugrpo_jax.files.bucket import create_object, move_objects, object_names, plain_errors

PATIENCE_S = 60.0  # how long a file that another host has just written may take to be seen here

_ATTEMPTS = 100  # to make a folder that another process removes again and again

# In the names of temporary files: two processes that write the same file must not write into each other's.
_PROCESS = secrets.token_hex(4)
_T = TypeVar("_T")


def to_path(name: str | Path) -> Path:
    """Return a `pathlib.Path`, or for `gs://bucket/folder` an `etils.epath.Path` with the same methods.

    Raises:
      ValueError: the name is a URL of other storage, or the package for `gs://` is not installed.
    """
    text = os.fspath(name)
    scheme, mark, rest = text.partition("://")
    if not mark:
        return Path(name)
    if scheme != "gs" or not rest.strip("/"):
        raise ValueError(f"{text}: not supported; use a local folder or gs://BUCKET/FOLDER")
    if importlib.util.find_spec("gcsfs") is None:
        raise ValueError(f"{text}: the package gcsfs is not installed; pip install 'mugrpo-jax[gcs]'")
    import fsspec
    from etils import epath

    # By default gcsfs remembers the lists of files, and would not see what other hosts write.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return cast(Path, epath.Path(text))


def is_remote(path: Path) -> bool:
    """Return whether a path is in a bucket."""
    return "://" in os.fspath(path)


def absolute(path: Path) -> Path:
    """Return an absolute path without symbolic links; a path in a bucket is returned as it is."""
    return path if is_remote(path) else path.resolve()


def nearest_existing(path: Path) -> Path:
    """Return a local path if it exists, or else the nearest of its parents that does."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def make_folder(path: Path) -> None:
    """Create a folder and its parents. A bucket has no folders, so nothing is done there."""
    if is_remote(path):
        return
    for attempt in range(_ATTEMPTS):  # another process may remove the folder or a parent in the meantime
        try:
            path.mkdir(parents=True, exist_ok=True)
            return
        except (FileExistsError, FileNotFoundError):
            if path.is_dir():
                return
            if path.exists() or attempt + 1 == _ATTEMPTS:
                raise


def names_below(folder: Path) -> list[str]:
    """Return the names of all files in a folder and its subfolders, relative to the folder, in order."""
    if is_remote(folder):
        return object_names(folder)
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def move_folder(folder: Path, target: Path) -> None:
    """Give a folder another name. A kill in between leaves all its files in `folder` or in `target`.

    In a bucket, a kill may also leave copies in both.
    """
    if is_remote(folder):
        move_objects(folder, target)
    else:
        os.rename(folder, target)


def remove_folder(folder: Path) -> None:
    """Remove a folder and all that is in it; nothing to do if it does not exist.

    Several processes may do this at once.
    """
    if is_remote(folder):
        with plain_errors():
            if folder.exists():
                cast(Any, folder).rmtree()
        return
    while folder.exists():
        with contextlib.suppress(FileNotFoundError):  # what another process has removed just now
            shutil.rmtree(folder)


def size(path: Path) -> int:
    """Return the number of bytes in a file."""
    stat: Any = path.stat()
    return stat.length if is_remote(path) else stat.st_size


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the content of a file, so that even a SIGKILL leaves the old or the new content."""
    data = content.encode() if isinstance(content, str) else content
    if is_remote(path):
        _upload(path, data)
        return
    temporary = path.with_name(f"{path.name}.{_PROCESS}.tmp")
    try:
        temporary.write_bytes(data)
        flush(temporary)
        os.replace(temporary, path)
    finally:
        discard(temporary)  # after an error; on a full disk it would take room


def create(path: Path, content: bytes) -> bool:
    """Create a file with this content; return False if it exists. Of several processes, only one succeeds.

    A link to a complete file makes sure that nobody ever sees an empty file. Some file systems have no links;
    there the file is created and then written.
    """
    if is_remote(path):
        return create_object(path, content)
    complete = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        complete.write_bytes(content)
        if (linked := _link(complete, path)) is not None:
            return linked
    finally:
        complete.unlink(missing_ok=True)
    try:
        with path.open("xb") as file:
            file.write(content)
        return True
    except FileExistsError:
        return False


def temporary_for(path: Path) -> Path:
    """Return a local path at which to write a file; `publish` then gives the file its name `path`."""
    if is_remote(path):  # files of several folders in a bucket may have the same name
        return scratch_folder() / f"{path.name}.{secrets.token_hex(4)}.tmp"
    return path.with_suffix(f".{_PROCESS}.tmp")


def publish(temporary: Path, path: Path) -> None:
    """Give a complete file its name: rename it, or upload it as one object and delete the local copy."""
    if is_remote(path):
        _upload(path, temporary.read_bytes())
        temporary.unlink()
    else:
        os.replace(temporary, path)


def publish_new(temporary: Path, path: Path) -> bool:
    """Give a complete file its name like `publish`, but return False if the name is taken.

    The temporary file is gone after it. A file system without links cannot tell whether another process takes
    the name in the same moment.
    """
    if is_remote(path):
        new = create_object(path, temporary.read_bytes())
    elif (linked := _link(temporary, path)) is not None:
        new = linked
    elif new := not path.exists():
        os.replace(temporary, path)
    discard(temporary)
    return new


def _link(file: Path, path: Path) -> bool | None:
    """Give a file another name; return False if the name is taken, None if there are no links here."""
    try:
        os.link(file, path)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        return None


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Keep other processes that call this from writing a local file; raise an error if one writes it."""
    read_only = path.exists() and not os.access(path, os.W_OK)
    with path.open("rb" if read_only else "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{path}: another process is writing it; wait until it ends, or choose another output"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


def discard(temporary: Path) -> None:
    """Remove a local file that did not get its name, if it is there."""
    with contextlib.suppress(OSError):
        temporary.unlink()


def local_copy(path: Path, folder: Path) -> Path:
    """Return the path of a file on a local disk. A file in a bucket is downloaded into `folder` once."""
    if not is_remote(path):
        return path
    copy = folder / path.name
    if not copy.exists():
        # Several threads may download the same file; each needs its own temporary file.
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(path.read_bytes())
        os.replace(file.name, copy)
    return copy


@functools.cache
def scratch_folder() -> Path:
    """Return a local folder of this process for files on their way to or from a bucket; removed at exit.

    Folders that killed processes left behind are removed too. A living process holds a lock on its folder.
    """
    for old in Path(tempfile.gettempdir()).glob("mugrpo-scratch-*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > 60 and _lock(old):  # a younger one may not be locked yet
                shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="mugrpo-scratch-"))
    _lock(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _lock(folder: Path) -> bool:
    """Lock a folder until this process ends; return False if another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        os.close(descriptor)
        return False


def _upload(path: Path, data: bytes) -> None:
    with plain_errors():
        path.write_bytes(data)


def flush(path: Path) -> None:
    """Wait until the content of a file, or the list of names in a folder, is on disk."""
    if is_remote(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def wait_for(read: Callable[[], _T], path: Path, seconds: float) -> _T:
    """Return `read()`. While it raises OSError or ValueError, try again, for up to `seconds` seconds.

    Use this for a file that another host has just written: a network file system may show the file late, or
    show it empty or incomplete at first. One printed line says that we wait.
    """
    end, said = time.monotonic() + seconds, False
    while True:
        try:
            return read()
        except (OSError, ValueError):
            if time.monotonic() >= end:
                raise
        if not said:
            print(f"{path}: missing or incomplete here; waiting for it up to {seconds:g} s", flush=True)
            said = True
        time.sleep(min(0.5, seconds / 20))
