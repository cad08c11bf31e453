"""The order of the house: who may import whom, and what may be imported at all."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent

# Lowest first; a module may import from its own floor and from those below.
FLOORS = [
    "errors",
    "utils",
    "core",
    "protocols",
    "clusters/timing",
    "clusters",
    "policies",
    "coordinator catalogue",
    "theory",
    "jobs",
    "server",
    "processes",
    "worker",
    "recording",
    "checkpoint",
    "engines",
    "run",
    "experiments",
    "report",
    "cli __main__",
]
BELOW_ENGINES = range(FLOORS.index("recording"))
FORBIDDEN_BELOW_ENGINES = {"torch.distributed", "ray", "multiprocessing", "threading", "time", "random"}
ALLOWED = {
    "worker/seeding": {"random"},
    "worker/background_loader": {"multiprocessing"},
    "worker/replica": {"time"},  # which measures the seconds of a gradient
    "worker/task_runner": {"time", "threading"},  # which injects slowness and faults
}
NO_TORCH = range(FLOORS.index("jobs"))


def name_of(path):
    return path.relative_to(SOURCE).with_suffix("").as_posix()


def floor_of(name):
    """Return the floor of the longest folder or module that the name begins with."""
    floors = {member: floor for floor, members in enumerate(FLOORS) for member in members.split()}
    parts = name.split("/")
    for end in range(len(parts), 0, -1):
        if "/".join(parts[:end]) in floors:
            return floors["/".join(parts[:end])]
    raise AssertionError(f"{name} has no floor: give it one in FLOORS")


def is_for_types_only(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports(path):
    """Yield the dotted names that a file imports, wherever in it, except for type checkers alone."""
    waiting = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if is_for_types_only(node):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ["paceline", *path.relative_to(SOURCE).parent.parts]
            base = base[: len(base) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        waiting += ast.iter_child_nodes(node)


def of_paceline(path):
    """Yield the modules of paceline that a file imports."""
    for dotted in imports(path):
        module = SOURCE.joinpath(*dotted.split(".")[1:])
        is_there = module.with_suffix(".py").exists() or (module / "__init__.py").exists()
        if dotted.startswith("paceline.") and is_there:
            yield name_of(module)


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")
each_file = pytest.mark.parametrize("path", FILES, ids=name_of)


def floor_of_file(path):
    return floor_of(name_of(path).removesuffix("/__init__"))


@each_file
def test_a_file_imports_only_from_its_floor_and_below(path):
    floor = floor_of_file(path)
    assert [name for name in of_paceline(path) if floor_of(name) > floor] == []


@each_file
def test_nothing_below_the_engines_knows_a_clock_a_process_or_a_cluster(path):
    if floor_of_file(path) in BELOW_ENGINES and not name_of(path).startswith("processes/"):
        forbidden = FORBIDDEN_BELOW_ENGINES - ALLOWED.get(name_of(path), set())
        found = {name for name in imports(path) for bad in forbidden if f"{name}.".startswith(f"{bad}.")}
        assert found == set()


@each_file
def test_what_decides_knows_no_tensor(path):
    if floor_of_file(path) in NO_TORCH:
        assert not any(f"{name}.".startswith("torch.") for name in imports(path))


@each_file
def test_only_the_distributed_engine_knows_torch_distributed(path):
    if not name_of(path).startswith("engines/distributed/"):
        assert not any(f"{name}.".startswith("torch.distributed.") for name in imports(path))


def test_the_table_of_floors_in_the_architecture_page_is_this_one():
    page = (Path(__file__).parents[2] / "docs/architecture.md").read_text(encoding="utf-8")
    table = page.partition("## Folders and floors")[2].partition("##")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert [" ".join(re.findall(r"`([^`]+)`", row)) for row in rows] == FLOORS


def test_every_floor_has_modules():
    assert {floor_of_file(path) for path in FILES} == set(range(len(FLOORS)))


@pytest.mark.parametrize("name", paceline.__all__)
def test_a_public_name_can_be_imported_and_says_what_it_is(name):
    assert getattr(paceline, name).__doc__


@pytest.mark.parametrize(("old", "new"), paceline._RENAMED.items())
def test_a_name_of_version_0_1_is_answered_with_the_new_one(old, new):
    assert hasattr(paceline, new)
    with pytest.raises(AttributeError, match=f"paceline.{old} is called paceline.{new} since version 0.2.0"):
        getattr(paceline, old)


def test_a_public_module_is_the_module():
    assert paceline.jobs is import_module("paceline.jobs")


def test_importing_paceline_is_cheap():
    code = "import sys, paceline; print(sorted({'torch', 'scipy', 'sklearn', 'numpy'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
