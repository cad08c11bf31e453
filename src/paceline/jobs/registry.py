"""Job registry: built-in jobs by name, and jobs of the user's modules."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from traceback import FrameSummary, TracebackException
from typing import Any

from paceline.errors import PacelineError, UsageError, did_you_mean
from paceline.jobs.cifar import cifar10, cifar100
from paceline.jobs.digits import digits
from paceline.jobs.job import Job
from paceline.jobs.lr_options import with_training_options
from paceline.jobs.mnist import mnist
from paceline.utils.argument_types import checked_types
from paceline.utils.spec_parser import Call, bind, parse_call

JOBS: Mapping[str, Callable[..., Job]] = {
    make.__name__: with_training_options(make) for make in (cifar10, cifar100, digits, mnist)
}
_PACKAGE = Path(__file__).parents[1]


class JobLoadError(UsageError):
    """Error raised by the user's module or function; ``details`` is its traceback from the user's first line on."""

    def __init__(self, text: str, error: BaseException) -> None:
        super().__init__(f"'{text}' raised {type(error).__name__}: {error}")
        report = TracebackException.from_exception(error)
        while report.stack and _is_internal(report.stack[0]):
            del report.stack[0]
        self.details = "".join(report.format())


@checked_types
def load_job(text: str, **settings: Any) -> Job:
    """Return a built-in job by its name, or a job of the user's code as ``module:object``.

    The text may have settings, as in ``mnist(folder=/data/mnist, model=softmax)``; built-in jobs also take those of
    `scheduled`. A module is searched in the current directory first; its object is a Job or a function that returns
    one.

    Args:
        text: name of the job, as typed by the user.
        settings: further settings, by name.

    Raises:
        UsageError: there is no such job, module or object, a setting does not fit, or the object is not a Job.
        JobLoadError: the user's module or function raised an error.
    """
    module = user_module(text)
    if module is not None:
        return _load_user_job(text, module, _call(text.partition(":")[2], settings))
    call = _call(text, settings)
    _check_name(call.name)
    return bind(call, JOBS)


def check_job_name(text: str) -> None:
    """Check the name of a built-in job, without making the job.

    Raises:
        UsageError: the text names no module, and no built-in job either.
    """
    if user_module(text) is None:
        _check_name(_call(text, {}).name)


def _check_name(name: str) -> None:
    if name not in JOBS:
        advice = did_you_mean(name, JOBS)
        raise UsageError(f"no job is called '{name}'{advice}; for a job of your own, type module:object")


def user_module(text: str) -> str | None:
    """Return the module of a job ``module:object``, after adding the current directory to Python's path.

    Returns:
        The module, None for a built-in job.
    """
    module, colon, _ = text.partition(":")
    if not colon or "(" in module:
        return None
    _add_current_directory()
    return module.strip()


def _call(text: str, settings: Mapping[str, Any]) -> Call:
    call = parse_call(text, "mnist(model=softmax)")
    if twice := sorted(call.kwargs.keys() & settings.keys()):
        raise UsageError(f"{', '.join(twice)} is given in '{text}' and as a setting: give it once")
    return Call(call.name, {**call.kwargs, **settings})


def _load_user_job(text: str, module: str, call: Call) -> Job:
    try:
        found = _find(module, call.name)
        job = bind(call, {call.name: found if isfunction(found) else lambda: found})
    except PacelineError:
        raise
    except (Exception, SystemExit) as error:
        raise JobLoadError(text, error) from error
    if not isinstance(job, Job):
        raise UsageError(f"'{text}' is of type {type(job).__name__}; expected a Job or a function that returns one")
    return job


def _add_current_directory() -> str:
    here = str(Path.cwd())
    if here not in sys.path:
        # The path of a console script does not have the current directory.
        sys.path.insert(0, here)
    return here


def _find(module: str, name: str) -> object:
    here = _add_current_directory()
    try:
        names = vars(import_module(module))
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        advice = "leave out '.py'" if module.endswith(".py") else "run the command in its folder, or install it"
        raise UsageError(f"no module '{module}' in {here} or on Python's path; {advice}") from error
    if name not in names:
        raise UsageError(f"module '{module}' has no '{name}'{did_you_mean(name, _candidates(module, names))}")
    return names[name]


def _candidates(module: str, names: Mapping[str, object]) -> list[str]:
    """Return the names of jobs, and of functions that the module itself defines."""
    return [
        name
        for name, value in names.items()
        if isinstance(value, Job) or (isfunction(value) and value.__module__ == module)
    ]


def _is_internal(frame: FrameSummary) -> bool:
    path = Path(frame.filename)
    return frame.filename.startswith("<frozen") or path.parent.name == "importlib" or _PACKAGE in path.parents
