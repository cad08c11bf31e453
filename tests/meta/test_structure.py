"""Structure of the source: floors, imports, circles, names, lengths and words."""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module

import pytest

import paceline
from paceline.utils.argument_types import NAMESPACES
from paths import ROOT
from source_tree import FILES, SOURCE, definitions, name_of, tree_of

# Lowest first; a module may import from its own floor and from those below.
FLOORS = [
    "errors",
    "utils",
    "core",
    "protocols",
    "clusters/timing",
    "ddp_recording",
    "clusters",
    "policies",
    "coordinator catalogue",
    "theory",
    "jobs",
    "tensors",
    "compression",
    "server",
    "processes",
    "worker",
    "recording",
    "checkpoint",
    "engines",
    "run",
    "user_loop",
    "integrations",
    "shares",
    "probe",
    "launcher",
    "experiments",
    "report",
    "watch",
    "diagnostics",
    "callbacks controllers plans results timing",
    "cli __main__",
]
BELOW_ENGINES = range(FLOORS.index("recording"))
FORBIDDEN_BELOW_ENGINES = {"torch.distributed", "ray", "multiprocessing", "threading", "time", "random"}
ALLOWED = {
    "worker/seeding": {"random", "threading"},
    "worker/background_loader": {"multiprocessing"},
    "worker/replica": {"time"},  # which measures the seconds of a gradient
    "worker/local_steps": {"time"},  # the same
    "worker/task_runner": {"time", "threading"},  # which injects slowness and faults
}
NO_TORCH = range(FLOORS.index("jobs"))
NAMES_THE_TYPE_OF_VECTORS = ["policies/compensation/base"]  # of which a user's compensator is given some

RUN_THE_USER_S_COMMAND = {"cli/run", "engines/distributed/rendezvous/sidecar"}
FILE_LINES, CLASS_LINES, FUNCTION_LINES, ARGUMENTS = 400, 300, 60, 8
MOST_NAMES = 60  # in `paceline` itself, namespaces too
LONG = re.compile(r"^\s*# Long: \w")  # with the reason
WORDS = re.compile(r"\b(?:whoever|nobody|somebody|everybody)\b", re.IGNORECASE)


@cache
def floor_of(name):
    """Return the floor of the longest folder or module that the name begins with."""
    floors = {member: floor for floor, members in enumerate(FLOORS) for member in members.split()}
    parts = name.split("/")
    for end in range(len(parts), 0, -1):
        if "/".join(parts[:end]) in floors:
            return floors["/".join(parts[:end])]
    raise AssertionError(f"{name} has no floor: give it one in FLOORS")


@cache
def module_at(dotted):
    """Return the name of the module of paceline with a dotted name, or None."""
    module = SOURCE.joinpath(*dotted.split(".")[1:])
    is_there = module.with_suffix(".py").exists() or (module / "__init__.py").exists()
    return name_of(module) if dotted.startswith("paceline.") and is_there else None


@cache
def imports(path):
    """Return the dotted names that a file imports, wherever in it, also for type checkers alone."""
    found = []
    waiting = [tree_of(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ["paceline", *path.relative_to(SOURCE).parent.parts]
            base = base[: len(base) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
            found += names if all(map(module_at, names)) else [module, *names]
        waiting += (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
    return found


def of_paceline(path):
    """Return the modules of paceline that a file imports."""
    return {name for name in map(module_at, imports(path)) if name is not None}


def floor_of_file(path):
    return floor_of(name_of(path).removesuffix("/__init__"))


def test_a_file_imports_only_from_its_floor_and_below():
    assert [
        f"{name_of(path)} imports {name}"
        for path in FILES
        for name in of_paceline(path)
        if floor_of(name) > floor_of_file(path)
    ] == []


def importers(files, package):
    """Return which of the files import a package or something of it."""
    return [name_of(path) for path in files if any(f"{name}.".startswith(f"{package}.") for name in imports(path))]


def test_modules_below_the_engines_import_no_clock_or_process_module():
    files = [path for path in FILES if floor_of_file(path) in BELOW_ENGINES]
    assert [
        f"{name} imports {package}"
        for package in sorted(FORBIDDEN_BELOW_ENGINES)
        for name in importers(files, package)
        if package not in ALLOWED.get(name, set()) and not name.startswith("processes/")
    ] == []


def test_modules_of_decisions_do_not_import_torch():
    assert importers([path for path in FILES if floor_of_file(path) in NO_TORCH], "torch") == NAMES_THE_TYPE_OF_VECTORS


def test_only_the_distributed_engine_and_the_patches_of_torch_import_torch_distributed():
    users = importers(FILES, "torch.distributed")
    assert [name for name in users if not name.startswith(("engines/distributed/", "shares/", "probe/"))] == []


def test_the_distributed_engine_is_imported_only_through_its_package():
    others = [path for path in FILES if not name_of(path).startswith("engines/distributed/")]
    found = [(name_of(path), name) for path in others for name in of_paceline(path)]
    assert [pair for pair in found if pair[1].startswith("engines/distributed/")] == []


def test_the_page_on_the_architecture_lists_the_floors():
    page = (ROOT / "docs/concepts/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`[\w/]+`(?:, )?)+) \|", page, re.MULTILINE)
    assert [" ".join(re.findall(r"`([\w/]+)`", row)) for row in rows] == FLOORS


def test_every_floor_has_modules():
    assert {floor_of_file(path) for path in FILES} == set(range(len(FLOORS)))


def test_there_are_no_circular_imports():
    folders = {name_of(path).removesuffix("/__init__"): path for path in FILES}
    graph = {name: {other for other in of_paceline(path) if other in folders} for name, path in folders.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle: {' -> '.join(error.args[1])}") from None


def test_no_public_class_name_is_defined_twice():
    places = defaultdict(list)
    for path, node in definitions(ast.ClassDef):
        if not node.name.startswith("_"):
            places[node.name].append(name_of(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def length(node):
    return node.end_lineno - node.lineno + 1


def explained(path, node):
    """Say whether a comment above a definition, or in the first line of its body, says why it is long."""
    lines = path.read_text(encoding="utf-8").splitlines()
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return any(LONG.search(lines[number - 1]) for number in (first - 1, node.body[0].lineno - 1))


def test_files_and_classes_are_short_or_say_why_not():
    for path in [*FILES, *(ROOT / "tests").rglob("*.py")]:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= FILE_LINES or any(map(LONG.search, lines[:5])), path
    classes = [(path, node) for path, node in definitions(ast.ClassDef) if length(node) > CLASS_LINES]
    assert [node.name for path, node in classes if not explained(path, node)] == []


def arguments_of(node):
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


@cache
def public_names():
    """Return each namespace of users, with each of its names."""
    spaces = [paceline, *(getattr(paceline, name) for name in NAMESPACES)]
    return [(space, name) for space in spaces for name in space.__all__]


def is_public(path, node):
    """Say whether users call it: a function of `pl`, or a command, whose arguments are its options."""
    is_command = name_of(path).startswith("cli/") and not node.name.startswith("_")
    return is_command or any(node.name == name for _, name in public_names())


def test_functions_are_short_and_have_few_arguments():
    ours = [(path, node) for path, node in definitions(ast.FunctionDef) if not is_public(path, node)]
    long = [(path, node) for path, node in ours if length(node) > FUNCTION_LINES]
    assert [(name_of(path), node.name) for path, node in long if not explained(path, node)] == []
    assert [(name_of(path), node.name) for path, node in ours if len(arguments_of(node)) > ARGUMENTS] == []


def test_sentences_name_who_acts():
    pages = [*FILES, ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = {str(path.relative_to(ROOT)) for path in pages if WORDS.search(path.read_text(encoding="utf-8"))}
    assert found == set()


def test_every_public_name_can_be_imported_and_has_a_docstring():
    assert [name for space, name in public_names() if not getattr(space, name).__doc__] == []
    assert len(paceline.__all__) <= MOST_NAMES
    with pytest.raises(AttributeError, match=r"no 'Exponential'; did you mean 'timing\.Exponential'"):
        paceline.Exponential  # noqa: B018


def test_a_public_module_is_the_module():
    assert paceline.jobs is import_module("paceline.jobs")


@pytest.mark.processes
def test_importing_paceline_is_cheap():
    code = "import sys, paceline; print(sorted({'torch', 'scipy', 'sklearn', 'numpy'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_python_that_is_started_imports_nothing_of_the_working_directory():
    first_options = {
        (name_of(path), ast.unparse(node.elts[1]))
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable"
    }
    assert {name for name, option in first_options if option != "'-P'"} == RUN_THE_USER_S_COMMAND
    assert ("user_loop/server/server_process", "'-P'") in first_options


def test_names_of_test_files_are_unique():
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert {name for name, files in names.items() if files > 1} == set()
