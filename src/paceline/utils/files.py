"""Safe file access: reads within size limits, atomic replacement, no writes through symbolic links.

Files that may come from another user are read here. A device, a pipe, a file with an endless line, or JSON with a
thousand levels raises a `ContentError` before it takes time or memory.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from itertools import count
from pathlib import Path
from stat import S_ISDIR, S_ISFIFO, S_ISLNK, S_ISREG
from typing import IO, Any, BinaryIO

from paceline.errors import RunError

MIB = 1 << 20
MOST_JSON_BYTES = 16 * MIB
MOST_TOML_BYTES = MIB // 2
MOST_TABLE_BYTES = 1024 * MIB  # of a CSV file
MOST_LINE_BYTES = 1 * MIB
MOST_SKIPPED_BYTES = 16 * MOST_LINE_BYTES  # of a line that is left out; a file without lines is no log
DEEPEST = 50  # levels of nested JSON or TOML
UNFINISHED = ".unfinished"  # prefix of the name of a file until it is complete
A_LINK = "it is a symbolic link, and paceline does not write through links"

_numbers = count(1)


class ContentError(ValueError):
    """Invalid file; the message has the reason, without the name of the file."""


def read_bytes(path: str | Path, most_bytes: int) -> bytes:
    """Return the content of a regular file.

    Args:
        path: path of the file; a symbolic link is followed.
        most_bytes: largest size of the file in bytes, >= 0.

    Raises:
        OSError: the file cannot be opened or read.
        ContentError: the file is not a regular file, or is too large.
    """
    with open_regular(path, most_bytes) as file:
        content = file.read(most_bytes + 1)  # the file may have grown
    if len(content) > most_bytes:
        raise ContentError(_too_large(len(content), most_bytes))
    return content


def read_json(path: str | Path, most_bytes: int = MOST_JSON_BYTES) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: the file cannot be opened or read.
        ContentError: the file is not a regular file, is too large, or is not JSON of at most `DEEPEST` levels.
    """
    return parse_json(read_bytes(path, most_bytes))


def parse_json(content: bytes, deepest: int = DEEPEST) -> Any:
    """Return the value of a JSON text.

    Raises:
        ContentError: the text is not JSON, has a key twice, or has more than `deepest` levels.

    >>> parse_json(b'{"seed": 0}')
    {'seed': 0}
    """
    try:
        value = json.loads(content.decode(), object_pairs_hook=_without_repetition)
    except RecursionError:
        raise ContentError(f"it has more than {deepest} levels") from None
    except UnicodeDecodeError as error:
        raise ContentError(f"it is not UTF-8 text at byte {error.start}") from error
    except ContentError:
        raise
    except ValueError as error:
        raise ContentError(f"it is not JSON ({error})") from error
    check_depth(value, deepest)
    return value


def read_toml(path: str | Path) -> tuple[str, dict[str, Any]]:
    """Return the text and the tables of a TOML file.

    Raises:
        OSError: the file cannot be opened or read.
        ContentError: the file is not a regular file, is too large, or is not TOML of at most `DEEPEST` levels.
    """
    try:
        text = read_bytes(path, MOST_TOML_BYTES).decode()
        if any(len(_DOTTED.findall(piece)) > DEEPEST for piece in _BETWEEN_KEYS.split(text)):
            raise ContentError(f"it has more than {DEEPEST} levels")  # parsing such a key takes cubic time
        tables = tomllib.loads(text)
    except RecursionError:
        raise ContentError(f"it has more than {DEEPEST} levels") from None
    except UnicodeDecodeError as error:
        raise ContentError(f"it is not UTF-8 text at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise ContentError(str(error)) from error
    check_depth(tables, DEEPEST)
    return text, tables


_BETWEEN_KEYS = re.compile(r"[^\w.\"' \t-]+")
_DOTTED = re.compile(r"[\w\"'-][ \t]*\.")


def check_depth(value: object, deepest: int) -> None:
    """Check the number of levels of nested lists and mappings.

    Raises:
        ContentError: there are more than `deepest` levels.
    """
    level = [value]
    for _ in range(deepest + 1):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _members(outer)]
        if not level:
            return
    raise ContentError(f"it has more than {deepest} levels")


def _members(outer: dict[Any, Any] | list[Any]) -> list[Any]:
    return [each for each in (outer.values() if isinstance(outer, dict) else outer) if isinstance(each, dict | list)]


@contextmanager
def open_regular(path: str | Path, most_bytes: int | None = None) -> Iterator[BinaryIO]:
    """Open a regular file for reading, without blocking on a pipe or a device.

    Raises:
        OSError: the file cannot be opened.
        ContentError: the file is not a regular file, or is larger than `most_bytes`.
    """
    with _opened(path) as file:
        status = os.fstat(file.fileno())
        if not S_ISREG(status.st_mode):
            raise ContentError(f"it is {_kind(status.st_mode)}, expected a regular file")
        if most_bytes is not None and status.st_size > most_bytes:
            raise ContentError(_too_large(status.st_size, most_bytes))
        yield file


def _opened(path: str | Path) -> BinaryIO:
    try:
        if S_ISDIR(os.stat(path).st_mode):
            raise ContentError("it is a folder, expected a file")
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb")
    except ContentError:
        raise
    except ValueError as error:  # a NUL byte in the name
        raise ContentError(f"its name is invalid ({error})") from error


@contextmanager
def open_table(path: str | Path, encoding: str = "utf-8") -> Iterator[Iterator[str]]:
    """Open a regular text file as lines with their line ends, for `csv`.

    Raises:
        OSError: the file cannot be opened or read.
        ContentError: the file is not a regular file, is too large, or has a line of more than `MOST_LINE_BYTES`.
    """
    with open_regular(path, MOST_TABLE_BYTES) as file, TextIOWrapper(file, encoding, newline="") as text:
        yield _text_lines(text)


def _text_lines(text: TextIOWrapper) -> Iterator[str]:
    try:
        while line := text.readline(MOST_LINE_BYTES):
            if len(line) == MOST_LINE_BYTES:
                raise ContentError(f"it has a line of more than {MOST_LINE_BYTES} characters")
            yield line
    except UnicodeDecodeError as error:
        raise ContentError(f"it is not {error.encoding} text") from error


def lines_of(file: BinaryIO, leave_out: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """Yield the lines of a binary file with their line ends; the last line may have none.

    Args:
        file: the file.
        leave_out: is called in place of a line of more than `MOST_LINE_BYTES`, with its size in bytes.

    Raises:
        ContentError: a line has more than `MOST_LINE_BYTES`, and there is no `leave_out`; or `MOST_SKIPPED_BYTES`.
    """
    while line := file.readline(MOST_LINE_BYTES + 1):
        if len(line) <= MOST_LINE_BYTES:
            yield line
            continue
        if leave_out is None:
            raise ContentError(f"it has a line of more than {MOST_LINE_BYTES} bytes")
        size_bytes = len(line)
        while not line.endswith(b"\n") and (line := file.readline(MOST_LINE_BYTES)):
            size_bytes += len(line)
            if size_bytes > MOST_SKIPPED_BYTES:
                raise ContentError(f"it has a line of more than {MOST_SKIPPED_BYTES} bytes")
        leave_out(size_bytes)


@contextmanager
def writing(
    what: object, advice: str = "", errors: type[Exception] | tuple[type[Exception], ...] = OSError
) -> Iterator[None]:
    """Convert the error of a file that cannot be written.

    Args:
        what: file or folder in the message.
        advice: text after the reason in the message.
        errors: classes of errors to convert.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        yield
    except errors as error:
        raise RunError(f"cannot write {what}: {getattr(error, 'strerror', None) or error}{advice}") from error


def replace_file(path: Path, content: bytes, *, to_disk: bool = False) -> None:
    """Replace a file atomically: write a new file in the same folder, then rename it; a link is replaced.

    Args:
        path: path of the file.
        content: new content.
        to_disk: whether the content is synchronised to disk before the rename.

    Raises:
        OSError: the file cannot be written; the old file is unchanged.
    """
    with suppress(FileNotFoundError):
        _refuse_special(path.lstat().st_mode, path)
    unfinished = path.with_name(f"{UNFINISHED}-{os.getpid()}-{next(_numbers)}")
    try:
        with create_file(unfinished) as file:
            file.write(content)
            file.flush()
            if to_disk:
                os.fsync(file.fileno())
        unfinished.rename(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def in_unicode(text: str) -> str:
    r"""Return a text in which bytes of file names that are not UTF-8 have become replacement characters.

    Python has each such byte as a surrogate, which cannot be encoded; without a UTF-8 locale it has all others so too.

    >>> ascii(in_unicode("caf\udce9")), ascii(in_unicode("caf\udcc3\udca9"))
    ("'caf\\ufffd'", "'caf\\xe9'")
    """
    return text.encode(errors="surrogateescape").decode(errors="replace")


def write_out(path: Path, content: bytes) -> None:
    """Write to a path of the user: replace a file, or write to a device.

    Raises:
        OSError: the path cannot be written.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)  # for example /dev/stdout
    else:
        replace_file(path, content)


def _refuse_special(mode: int, path: Path) -> None:
    if not S_ISREG(mode) and not S_ISLNK(mode):
        raise OSError(errno.EINVAL, f"it is {_kind(mode)}, expected a regular file", str(path))


def create_file(path: Path) -> BinaryIO:
    """Return a new file, open for reading and writing; an earlier file or link is removed first.

    Raises:
        OSError: the file cannot be created.
    """
    path.unlink(missing_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "r+b")


def open_to_extend(path: Path) -> BinaryIO:
    """Return an existing regular file, open for reading and writing.

    Raises:
        OSError: the file cannot be opened, is a symbolic link, or is not a regular file.
    """
    return os.fdopen(_open_regular_to_write(path, os.O_RDWR), "r+b")


def open_to_append(path: Path) -> IO[bytes]:
    """Return a regular file, which is made if there is none, open for writing at its end without a buffer.

    Raises:
        OSError: the file cannot be opened, is a symbolic link, or is not a regular file.
    """
    return os.fdopen(_open_regular_to_write(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab", buffering=0)


def _open_regular_to_write(path: Path, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, A_LINK, str(path)) from error
        raise
    try:
        _refuse_special(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def refuse_link(folder: Path) -> None:
    """Check that a folder to write to is not a symbolic link.

    Raises:
        OSError: the folder is a symbolic link.
    """
    if folder.is_symlink():
        raise OSError(errno.ELOOP, A_LINK, str(folder))


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ContentError(f"it has the key {twice[:40]!r} twice")
    return content


def _kind(mode: int) -> str:
    return "a folder" if S_ISDIR(mode) else "a pipe" if S_ISFIFO(mode) else "a device or a socket"


def _too_large(size_bytes: int, most_bytes: int) -> str:
    return f"it has {size_bytes / MIB:.4g} MiB, expected at most {most_bytes / MIB:.4g}"
