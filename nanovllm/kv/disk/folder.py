"""Folder of page files: every call to the file system that the disk tier makes.

    DIR/pages/          0700
        3f/             0700, one of NUM_SHARDS
            3f0c...     0600, a page: 64 hexadecimal digits
            3f0c....1b2c...part   0600, a page that is being written

A file is written beside its place and renamed, so a page's name always leads to a complete file.
Its writer holds a lock on it. A `.part` file without a lock belongs to a crashed server and is
removed. The time of modification is the stamp of the last use, see `PageIndex.next_stamp`.

All names are resolved relative to open folders, and only plain files are opened.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from nanovllm.kv.disk.format import BLOCK, PageFault
from nanovllm.typed_yaml import ConfigError

PAGES = "pages"
NUM_SHARDS = 256
PAGE_NAME = re.compile(r"[0-9a-f]{64}")
PART_NAME = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}\.part")
MAX_STAMP = 2**62  # nanoseconds, the year 2116; later times are those of a clock that was wrong
PROBE = "0" * 64  # name of the page that `probe` writes; it is never renamed to it
OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
O_DIRECT = getattr(os, "O_DIRECT", 0)  # absent on other systems than Linux
MOST_PARTS = 9  # `.part` files of one page that are created, if others are removed at once
NO_LOCKS = {errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}
# Errors of a folder that may pass. All others at the start are an error in the recipe.
PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}


class PageFile(NamedTuple):
    size: int
    stamp: int  # of the last use


def aligned_bytes(length: int) -> memoryview:
    """Return memory that begins at a page of the system, as direct I/O requires."""
    return memoryview(mmap.mmap(-1, length))


def shard_of(name: str) -> int:
    return int(name[:2], 16)


class PageFolder:
    """Page files below `path`. Methods raise OSError, or PageFault for a file that is no page.

    Threads may call all methods at the same time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_direct: bool | None = None  # bypass the page cache; None: `probe` has to find out
        self._root = -1
        self._device: int | None = None  # of the first root
        self._replaced: list[int] = []  # former roots, which threads may still use

    def open(self) -> None:
        """Create and open the folder.

        Raise ConfigError if the folder cannot be used, or OSError for a fault that may pass. Call
        again after the folder was removed; it must then be on the same device. Otherwise pages
        would fill the disk below a file system that is not mounted any more.
        """
        try:
            root = self._opened()
        except OSError as error:
            if error.errno in PASSING or self._device is not None:
                raise
            raise ConfigError(
                f"cache.disk.path: cannot use {self.path}: {error.strerror}; name a folder that "
                "this user may write to, or leave cache.disk out"
            ) from None
        if self._root >= 0:
            self._replaced.append(self._root)
        self._root = root
        self.is_direct = None

    def _opened(self) -> int:
        try:
            self.path.mkdir(mode=0o700, parents=self._device is None, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, "it is not a folder") from None
        if self._device is not None and os.stat(self.path).st_dev != self._device:
            raise OSError(errno.ENODEV, "the file system is not mounted", str(self.path))
        folder = self.path / PAGES
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        root = _opened_folder(folder, PAGES)
        try:
            status = os.fstat(root)
            if status.st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, f"{PAGES} belongs to another user")
            if stat.S_IMODE(status.st_mode) != 0o700:
                os.fchmod(root, 0o700)
        except OSError:
            os.close(root)
            raise
        self._device = status.st_dev
        return root

    def _allows_direct(self) -> bool:
        """Return True if a small file can be written and read with direct I/O."""
        pattern = os.urandom(BLOCK)
        view = aligned_bytes(2 * BLOCK)
        view[:BLOCK] = pattern
        try:
            with self._trial(O_DIRECT) as fd:
                _write_all(fd, view[:BLOCK])
                _read_all(fd, view[BLOCK:])
        except OSError as error:
            if error.errno in PASSING:
                raise
            return False  # overlayfs, tmpfs and NFS: EINVAL
        return bool(view[BLOCK:] == pattern)

    def is_removed(self) -> bool:
        """Return True if the folder was removed or replaced."""
        with suppress(OSError):
            here = os.fstat(self._root)
            return not os.path.samestat(here, os.stat(self.path / PAGES, follow_symlinks=False))
        return True

    def write(self, name: str, file: memoryview, stamp: int) -> None:
        """Write a page under its name. An existing file of that name is replaced."""
        with (
            self._shard(shard_of(name), create=True) as shard,
            _part(shard, name, self._direct) as (fd, part),
        ):
            _write_all(fd, file)
            with suppress(OSError):
                os.utime(fd, ns=(stamp, stamp))
            os.rename(part, name, src_dir_fd=shard, dst_dir_fd=shard)

    def read(self, name: str, file: memoryview, stamp: int) -> None:
        """Read a page's file, which must have the size of `file`, and note its use."""
        with self._shard(shard_of(name)) as shard:
            try:
                flags = os.O_RDONLY | os.O_NONBLOCK | OPEN | self._direct
                fd = os.open(name, flags, dir_fd=shard)
            except OSError:
                its = os.stat(name, dir_fd=shard, follow_symlinks=False)
                if not stat.S_ISREG(its.st_mode):
                    raise PageFault("foreign", "it is not a plain file") from None
                raise
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise PageFault("foreign", "it is not a plain file")
            if status.st_size != len(file):
                fault = f"it has {status.st_size} bytes instead of {len(file)}"
                raise PageFault("truncated", fault)
            _read_all(fd, file)
            with suppress(OSError):  # a read-only file system
                os.utime(fd, ns=(stamp, stamp))
        finally:
            os.close(fd)

    def remove(self, name: str, newest: int | None = None) -> int | None:
        """Remove a file. Return None if it is gone, or its stamp if it was used after `newest`."""
        with suppress(FileNotFoundError, NotADirectoryError), self._shard(shard_of(name)) as shard:
            status = os.stat(name, dir_fd=shard, follow_symlinks=False)
            stamp = _stamp_of(status)
            if newest is not None and stamp > newest:
                return stamp
            if not stat.S_ISDIR(status.st_mode):
                os.unlink(name, dir_fd=shard)
        return None

    def scan(self, number: int) -> dict[str, PageFile]:
        """Return the pages of one shard by name. Remove unfinished files of crashed servers.

        A page's file that was moved to another shard is never found by its name, so it is left out.
        """
        files: dict[str, PageFile] = {}
        with suppress(FileNotFoundError), self._shard(number) as shard:
            for entry in os.scandir(shard):
                is_page = PAGE_NAME.fullmatch(entry.name) and shard_of(entry.name) == number
                if is_page and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):  # removed by another server
                        its = entry.stat(follow_symlinks=False)
                        files[entry.name] = PageFile(its.st_size, _stamp_of(its))
                elif PART_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    with suppress(OSError):  # removed by another server, or locked by its writer
                        _remove_unlocked(shard, entry.name)
        return files

    def probe(self, length: int) -> None:
        """Write and read a file of `length` bytes, and remove it. Raise OSError if that fails.

        The first call finds out if the file system allows direct I/O.
        """
        if self.is_direct is None:
            self.is_direct = O_DIRECT != 0 and self._allows_direct()
        view = aligned_bytes(length)
        with self._trial(self._direct) as fd:
            _write_all(fd, view)
            _read_all(fd, view)

    def close(self) -> None:
        """Close the folder. No other thread may use it any more."""
        for fd in (*self._replaced, self._root):
            if fd >= 0:
                os.close(fd)
        self._replaced, self._root = [], -1

    @property
    def _direct(self) -> int:
        return O_DIRECT if self.is_direct else 0

    @contextmanager
    def _shard(self, number: int, *, create: bool = False) -> Iterator[int]:
        """Open a shard's folder. Raise FileNotFoundError if it does not exist.

        Raise NotADirectoryError if something else has its name.
        """
        name = f"{number:02x}"
        shown = f"{PAGES}/{name}"
        try:
            fd = _opened_folder(name, shown, self._root)
        except FileNotFoundError:
            if not create:
                raise
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._root)
            fd = _opened_folder(name, shown, self._root)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _trial(self, flags: int) -> Iterator[int]:
        """Create a file for a trial, and remove it."""
        with self._shard(self._usable_shard()) as shard, _part(shard, PROBE, flags) as (fd, _):
            yield fd

    def _usable_shard(self) -> int:
        """Return the number of the first shard whose name no other file has. Create its folder."""
        for number in range(NUM_SHARDS):
            with suppress(NotADirectoryError), self._shard(number, create=True):
                return number
        raise NotADirectoryError(errno.ENOTDIR, f"no folder can be created in {PAGES}")


def _opened_folder(name: str | Path, shown: str, parent: int | None = None) -> int:
    """Return the descriptor of a folder. Raise NotADirectoryError for a link or another file."""
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | OPEN, dir_fd=parent)
    except NotADirectoryError:
        raise NotADirectoryError(errno.ENOTDIR, f"{shown} is not a folder") from None


def _stamp_of(file: os.stat_result) -> int:
    return file.st_mtime_ns if 0 <= file.st_mtime_ns < MAX_STAMP else 0


@contextmanager
def _part(shard: int, name: str, flags: int) -> Iterator[tuple[int, str]]:
    """Create a locked `.part` file. Yield its descriptor and name; remove it unless renamed."""
    fd, part = _locked_part(shard, name, flags)
    try:
        yield fd, part
    finally:
        with suppress(OSError):  # usually renamed
            os.unlink(part, dir_fd=shard)
        os.close(fd)


def _locked_part(shard: int, name: str, flags: int) -> tuple[int, str]:
    """Create and lock a `.part` file. Return its descriptor and name.

    Another server may remove the file before it is locked. Then create another one.
    """
    create = os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN
    for left in reversed(range(MOST_PARTS)):
        part = f"{name}.{os.urandom(8).hex()}.part"
        fd = os.open(part, create | flags, 0o600, dir_fd=shard)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(fd)
                raise
        if os.fstat(fd).st_nlink or not left:
            break
        os.close(fd)
    return fd, part


def _remove_unlocked(shard: int, part: str) -> None:
    fd = os.open(part, os.O_RDWR | os.O_NONBLOCK | OPEN, dir_fd=shard)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(part, dir_fd=shard)
    finally:
        os.close(fd)


def _write_all(fd: int, data: memoryview) -> None:
    at = 0
    while at < len(data):
        written = os.pwrite(fd, data[at:], at)
        if not written:
            raise OSError(errno.EIO, "no byte was written")
        at += written


def _read_all(fd: int, into: memoryview) -> None:
    at = 0
    while at < len(into):
        count = os.preadv(fd, [into[at:]], at)
        if not count:
            raise PageFault("truncated", f"it ends after {at} bytes")
        at += count
