"""Module that Python imports at its start in each process of a command; it installs the probe or balancer in ranks."""

import importlib.machinery
import importlib.util
import os
import sys


def _run_next_sitecustomize() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [place for place in sys.path if os.path.abspath(place) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _install_in_rank() -> None:
    try:
        from paceline.probe import install as probe
        from paceline.shares import install as balance
    except ImportError as error:
        print(f"paceline: this rank is as without it, because its Python has no paceline ({error})", file=sys.stderr)
    else:
        probe.install()
        balance.install()


try:
    _run_next_sitecustomize()
finally:
    if "RANK" in os.environ:
        _install_in_rank()
