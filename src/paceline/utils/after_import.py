"""Functions that run once a module has been imported, before the code that imports it goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def call_after_import(name: str, function: Callable[[], object]) -> None:
    """Call a function when a module has been imported; at once if it is imported already.

    Args:
        name: dotted name of the module.
        function: function without arguments.
    """
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _Finder(name, function))


class _Finder:
    """Finder that adds a call to the import of one module, and then removes itself."""

    def __init__(self, name: str, function: Callable[[], object]) -> None:
        self._name = name
        self._function = function

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the module, with a loader that also calls the function; None for other modules."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_call(module: ModuleType) -> None:
            load(module)
            self._function()

        spec.loader.exec_module = load_and_call  # type: ignore[method-assign]
        return spec
