"""Digests of the source code of a run: of paceline and of the files that define the parts of a job."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from pkgutil import get_importer
from types import ModuleType
from typing import NamedTuple

from paceline.utils.files import in_unicode

DIGITS = 12
DEEPEST = 3  # levels of nested parts, as the transform of the data set of a subset
SHORT = 20  # length of the longest collection whose members are searched
MAIN = ("__main__", "__mp_main__")
KNOWN_BY_VERSION = sys.stdlib_module_names | {"numpy", "paceline", "torch"}


def code_of(parts: Iterable[object], *, with_main: bool = True) -> dict[str, str]:
    """Return the digest of paceline's source, and of each file that defines one of these parts, by module.

    Files without readable source and packages known by their version are left out.

    Args:
        parts: functions, types and objects; nested parts, partial functions and short collections are searched too.
        with_main: whether the file of the main module counts.
    """
    modules = {name for part in parts for name in _modules(part, DEEPEST) if with_main or name not in MAIN}
    digests = {_name(module): _digest(module) for name in sorted(modules) if (module := sys.modules.get(name))}
    return {"paceline": _of_paceline(), **{name: digest for name, digest in digests.items() if digest}}


@cache
def _of_paceline() -> str:
    return digest_of_package(files("paceline"))


def main_module_of(parts: Iterable[object]) -> str:
    """Return the script or the kind of session that defines one of these parts; empty if all can be imported.

    Args:
        parts: functions, types and objects, as for `code_of`.
    """
    if not any(name in MAIN for part in parts for name in _modules(part, DEEPEST)):
        return ""
    main = sys.modules["__main__"]
    is_script = _content(main) is not None
    return f"the script {_name(main)}" if is_script else "a notebook or an interactive session"


class CodeFile(NamedTuple):
    """File that an import executes, with the digest of its content."""

    path: Path
    digest: str


def code_behind(module: str) -> dict[str, CodeFile]:
    """Return the files that importing a module executes, by module and packages first, without executing them.

    Modules without a file (namespace packages, built-in modules) are left out; the search ends at a module that is not
    found. `importlib.util.find_spec` is no alternative: it executes the packages.

    Args:
        module: dotted name of the module.
    """
    found: dict[str, CodeFile] = {}
    first, *others = module.split(".")
    spec, name = _top_level(first), first
    while spec is not None:
        if spec.has_location and spec.origin:
            content = _source(spec.origin, spec.loader) or b""
            found[name] = CodeFile(Path(spec.origin), sha256(content).hexdigest()[:DIGITS])
        if not others:
            break
        name = f"{name}.{others.pop(0)}"
        spec = _within(spec, name)
    return found


def _top_level(name: str) -> ModuleSpec | None:
    try:
        return PathFinder.find_spec(name) or find_spec(name)
    except (ImportError, ValueError):
        return None


def _within(package: ModuleSpec, name: str) -> ModuleSpec | None:
    """Return the spec of a module in a package, by the rules of the import system; None if it is not found."""
    portions: list[str] = []
    for folder in package.submodule_search_locations or ():
        finder = get_importer(folder)
        spec = finder.find_spec(name) if finder else None
        if spec is not None and spec.loader is not None:
            return spec
        portions += (spec and spec.submodule_search_locations) or []
    namespace = ModuleSpec(name, None, is_package=True)
    namespace.submodule_search_locations = portions
    return namespace if portions else None


def _source(path: str, loader: object) -> bytes | None:
    """Return the content of a file, on the disk or in the archive of a loader; None if it cannot be read."""
    with suppress(OSError):
        return Path(path).read_bytes()
    get_data = getattr(loader, "get_data", None)  # the loader of a zip archive has it
    with suppress(OSError):
        content: bytes | None = get_data(path) if get_data else None
        return content
    return None


def digest_of_package(folder: Traversable) -> str:
    """Return a digest of the names and contents of the Python files in a folder, on the disk or in an archive."""
    digest = sha256()
    for name, content in sorted(_sources(folder)):
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:DIGITS]


def _sources(folder: Traversable, within: str = "") -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _sources(entry, f"{within}{entry.name}/")
        elif entry.name.endswith(".py"):
            yield f"{within}{entry.name}", entry.read_bytes()


def _modules(part: object, depth: int) -> Iterator[str]:
    """Yield the modules that define a part and its nested parts."""
    name = getattr(part, "__module__", None)
    if isinstance(name, str) and name.partition(".")[0] not in KNOWN_BY_VERSION:
        yield name
    if depth:
        for inner in _parts(part):
            yield from _modules(inner, depth - 1)


def _parts(part: object) -> Iterable[object]:
    if isinstance(part, partial):
        return [part.func, *part.args, *part.keywords.values()]
    if isinstance(part, list | tuple):
        return part if len(part) <= SHORT else ()
    if isinstance(part, Mapping):
        return part.values() if len(part) <= SHORT else ()
    is_object = not isinstance(part, type | ModuleType) and hasattr(part, "__dict__")
    return list(vars(part).values())[:SHORT] if is_object else ()


def _name(module: ModuleType) -> str:
    """Return a name of a module that is the same in every process."""
    return in_unicode(Path(module.__file__ or "").name if module.__name__ in MAIN else module.__name__)


def _digest(module: ModuleType) -> str | None:
    content = _content(module)
    return None if content is None else sha256(content).hexdigest()[:DIGITS]


def _content(module: ModuleType) -> bytes | None:
    path = getattr(module, "__file__", None)
    if path is None or path.endswith(".pyc"):  # compiled code contains more than the source
        return None
    return _source(path, module.__loader__)
