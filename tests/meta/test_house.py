"""The order of the house: who may import whom, and what may be imported at all."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent

# Lowest first; a file may import from its own floor and from those below. A name ending in / is a folder.
DECIDING = "events history extent protocols reduction switch_timing timing/ stop learning_rate momentum_limit"
MEMBERS = "targets metrics phase_share lead patience roster faults minibatches open_update dispatch evaluations"
SAVING = "checkpoint checkpoint/state checkpoint/store checkpoint/identity"
FLOORS = [
    "errors user_code argument_types checks files text wording shown tables streams attributes slices",
    f"{DECIDING} {MEMBERS} schedule cluster cluster_text ranks torchrun theory/ estimators/ compensation/",
    "controllers/ catalogue coordinator",
    "vectors averaging dataloader job seeding data step_meter zero_gradients optimizers server allreduce/ jobs/",
    f"callbacks/ recording/ engines/ rules {SAVING}",
    "session checkpoint/keeper checkpoint/resume replay logged_patience train simulation search/ comparison/",
    "summary compare cli/ __main__ report/",
]
BELOW_ENGINES = range(4)
FORBIDDEN_BELOW_ENGINES = {"torch.distributed", "ray", "multiprocessing", "threading", "time", "random"}
NO_TORCH = range(3)


def name_of(path):
    return path.relative_to(SOURCE).with_suffix("").as_posix()


def floor_of(name):
    for floor, members in enumerate(FLOORS):
        for member in members.split():
            if name == member or (member.endswith("/") and f"{name}/".startswith(member)):
                return floor
    raise AssertionError(f"{name} has no floor in the house: give it one in FLOORS")


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
    if floor_of_file(path) in BELOW_ENGINES:
        forbidden = FORBIDDEN_BELOW_ENGINES - ({"random"} if name_of(path) == "seeding" else set())  # which it seeds
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


def test_every_member_of_the_house_that_is_there_is_found():
    assert {floor_of_file(path) for path in FILES} >= {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("name", paceline.__all__)
def test_a_public_name_can_be_imported_and_says_what_it_is(name):
    assert getattr(paceline, name).__doc__


def test_a_public_module_is_the_module():
    assert paceline.jobs is import_module("paceline.jobs")


def test_importing_paceline_is_cheap():
    code = "import sys, paceline; print(sorted({'torch', 'scipy', 'sklearn', 'numpy'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
