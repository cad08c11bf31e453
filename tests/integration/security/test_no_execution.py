"""Nothing that comes over the network is unpickled, imported or executed."""

import ast
from pathlib import Path

import pytest
import torch

from paceline.engines import distributed
from paceline.engines.distributed.transport import messages, tensor_descriptions
from paceline.engines.distributed.transport.encoded import encoded

FOLDER = Path(distributed.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))
MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "importlib", "runpy", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__", "load", "loads", "import_module"}
ALLOWED_CALLS = {"loads": {"json"}, "load": set(), "compile": {"re"}}


def violations(tree):
    """Yield what could execute bytes: imports, calls, and names of attributes that are not in the source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            module = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            found = {each.split(".")[0] for each in module} & MODULES
            if found and (module, names) != (["importlib.metadata"], ["version"]):
                yield node.lineno, found
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            owner, _, last = name.rpartition(".")
            if last in CALLS and owner not in ALLOWED_CALLS.get(last, ()) and not (last == "load" and owner == "self"):
                yield node.lineno, name
            if last == "getattr" and not isinstance(node.args[1], ast.Constant):
                yield node.lineno, "getattr with a name that is computed"


def test_no_module_of_the_engines_unpickles_or_executes():
    assert len(FILES) > 30
    found = {path.relative_to(FOLDER).as_posix(): list(violations(ast.parse(path.read_text()))) for path in FILES}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "x.loads(b)",
        "torch.load(f)",
        "eval(x)",
        "compile(x)",
        "getattr(torch, name)",
    ],
)
def test_the_check_finds_what_executes(source):
    assert list(violations(ast.parse(source)))


def test_only_structs_of_the_union_are_decoded():
    """msgspec makes instances of these types and of plain values, and of nothing else."""
    kinds = messages.Message.__args__
    assert all(issubclass(each, messages.MessageStruct) for each in kinds)
    with pytest.raises(ValueError, match="no message that is known"):
        messages.decode(messages.msgspec.msgpack.encode(["StateMessage", {}]))


def test_a_dtype_is_taken_from_a_table():
    assert tensor_descriptions.DTYPES["bfloat16"] is torch.bfloat16
    assert all(isinstance(each, torch.dtype) for each in tensor_descriptions.DTYPES.values())
    for name in ("load", "_dynamo", "os", "hub", "quint8", "__class__"):
        with pytest.raises(ValueError, match="invalid tensors"):
            tensor_descriptions.allocate(encoded({"a": (name, [1])}))
