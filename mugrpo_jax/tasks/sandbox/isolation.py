"""Move this process into namespaces of its own, without bubblewrap: no network, few files, no privileges.

root needs no user namespace, and takes a user id that no other process has. An ordinary user needs user
namespaces. All functions raise OSError if the system does not allow it.
"""

import ctypes
import os
import stat
from collections.abc import Sequence

_NEW_USER, _NEW_OTHERS = 0x10000000, 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_DETACH = 2
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SYSCALL_MOUNT_SETATTR = 442  # the same number on all machines
_FIRST_USER = 1_000_000_000

libc = ctypes.CDLL(None, use_errno=True)


def enter_namespaces() -> int:
    """Leave the namespaces of the system; the next fork is process 1. Return the user id for programs."""
    user, group = os.getuid(), os.getgid()
    try:
        if user != 0:
            raise PermissionError
        _call("unshare", _NEW_OTHERS)
        return _FIRST_USER + os.getpid()
    except PermissionError:
        if user == 0:  # root of a container; as another user, because user 0 has no limit of processes
            user = group = _FIRST_USER + os.getpid()
            _become(user)
            _call("prctl", 4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, without which /proc/self is not ours
        _call("unshare", _NEW_USER | _NEW_OTHERS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return 1000


def build_root(visible: Sequence[str], user: int, megabytes: int) -> None:
    """Replace all files by an empty root with the `visible` paths, read-only, and a writable `/sandbox`."""
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _NO_SETUID | _NO_DEVICES, "mode=755,size=4m")
    os.chdir("/tmp")
    os.mkdir("old")
    _call("pivot_root", b".", b"old")
    os.chdir("/")
    for path in sorted({*visible, *_DEVICES}):
        _show(path)
    _call("umount2", b"/old", _DETACH)
    os.rmdir("/old")
    os.mkdir("/sandbox")
    _mount(None, "/", None, _REMOUNT | _BIND | _READ_ONLY | _NO_SETUID | _NO_DEVICES)
    own = f"mode=700,size={megabytes}m,nr_inodes=4096,uid={user},gid={user}"
    _mount("tmpfs", "/sandbox", "tmpfs", _NO_SETUID | _NO_DEVICES, own)


def _show(path: str) -> None:
    """Make one path of the old root visible in the new root, read-only."""
    old = "/old" + path
    if not os.path.lexists(old) or os.path.lexists(path):
        return  # it is not there, or a folder above it is visible already
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    if os.path.islink(old):
        os.symlink(os.readlink(old), path)
        return
    if stat.S_ISDIR(os.stat(old).st_mode):
        os.mkdir(path, 0o755)
    else:
        open(path, "x").close()
    _mount(old, path, None, _BIND | _RECURSIVE)
    if path in _DEVICES:
        return
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY | _NO_SETUID, 0, 0, 0)
    if libc.syscall(_SYSCALL_MOUNT_SETATTR, -100, path.encode(), 0x8000, attributes, 32):
        kept = os.statvfs(path).f_flag & 0x40F  # flags that a user namespace may not remove
        _mount(None, path, None, _REMOUNT | _BIND | _READ_ONLY | _NO_SETUID | kept)


def drop_privileges(user: int) -> None:
    """Become `user` for ever, without capabilities, and deny other processes to trace this one."""
    if os.getuid() != user:
        _become(user)
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _call("capset", header, nothing)
    _call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    _call("prctl", 4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    _call("prctl", 1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _call("mount", *texts[:3], ctypes.c_ulong(flags), texts[3])


def _call(name: str, *arguments: object) -> None:
    if name == "pivot_root":
        number = {"x86_64": 155}.get(os.uname().machine, 41)
        failed = libc.syscall(number, *arguments)
    else:
        failed = getattr(libc, name)(*arguments)
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
