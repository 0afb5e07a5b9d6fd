"""Forbid system calls that no program of a task needs: ptrace, new namespaces, mounts, sockets of a network.

This is a second line of defence behind the namespaces. It also forbids memory that belongs to no process, and
that the limit of memory does not count. It exists for x86_64 and aarch64; other machines go without it.
"""

import ctypes
import errno
import platform
import struct

_CALLS = {  # the numbers of the system calls on (x86_64, aarch64)
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "io_uring_setup": (425, 425),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NEW_USER = 0x10000000
_AF_UNIX = 1


def forbid_calls(libc: ctypes.CDLL) -> None:
    """Let these calls fail in this process and all its children. `no_new_privs` must be set before."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        return
    column, architecture = _ARCHITECTURES[machine]
    no, missing = _FAIL | errno.EPERM, _FAIL | errno.ENOSYS
    rows = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, no), (_LOAD, 0, 0, 0)]
    rows += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, no)]  # the second call table of x86_64 (x32)
    for numbers in _CALLS.values():
        rows += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, no)]
    # clone3 has its flags in memory, where a filter cannot look; libc then uses clone.
    rows += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, missing)]
    rows += [(_EQUAL, 0, 4, _CLONE[column]), (_LOAD, 0, 0, 16), (_ANY_BIT, 0, 1, _NEW_USER)]
    rows += [(_RETURN, 0, 0, no), (_RETURN, 0, 0, _ALLOW)]
    rows += [(_EQUAL, 0, 3, _SOCKET[column]), (_LOAD, 0, 0, 16), (_EQUAL, 1, 0, _AF_UNIX)]
    rows += [(_RETURN, 0, 0, no), (_RETURN, 0, 0, _ALLOW)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    program = struct.pack("HxxxxxxP", len(rows), ctypes.addressof(filters))
    if libc.prctl(22, 2, program, 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError(ctypes.get_errno(), "seccomp")
