"""Calls, records and assignments: what a value means is said where it is passed, not only in the signature."""

import ast
from collections import defaultdict
from functools import cache

from source_tree import FILES, definitions, name_of, tree_of

MOST_BY_POSITION = 5  # arguments of a call
FEW_FIELDS = 3  # of a record, which may then be made by position
MOST_OF_A_TUPLE = 4  # by position, as some are made for each gradient
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

# Records of more fields that are made by position.
BY_POSITION = {
    "End": "by keyword, its fields would come after its tensors on the wire",
    "FollowUpdate": "the same",
}


def calls(tree):
    """Yield each call, with the names of the variable arguments of the functions around it."""
    waiting = [(tree, frozenset())]
    while waiting:
        node, varargs = waiting.pop()
        if isinstance(node, FUNCTIONS) and node.args.vararg is not None:
            varargs |= {node.args.vararg.arg}
        if isinstance(node, ast.Call):
            yield node, varargs
        waiting += [(child, varargs) for child in ast.iter_child_nodes(node)]


def splats_among_others(call, varargs):
    """Say whether a call has a splat among other positional arguments, unless it passes on variable arguments."""
    splats = [each.value for each in call.args if isinstance(each, ast.Starred)]
    return len(call.args) > 1 and any(not (isinstance(each, ast.Name) and each.id in varargs) for each in splats)


def splats_a_list_of_arguments(call):
    """Say whether a call has a splat of a tuple or list that is written there, and is of a fixed length."""
    lists = [each.value for each in call.args if isinstance(each, ast.Starred)]
    lists = [each for each in lists if isinstance(each, ast.Tuple | ast.List)]
    return any(not any(isinstance(element, ast.Starred) for element in each.elts) for each in lists)


def bundles(assignment):
    """Say whether one statement assigns attributes that have nothing to do with each other.

    In a swap, or where a value is taken and its place cleared, each pair of target and value reads the target of
    another pair, or another pair reads its target.
    """
    target, value = assignment.targets[0], assignment.value
    if not (isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)):
        return False
    if not any(isinstance(each, ast.Attribute) for each in target.elts):
        return False
    pairs = list(zip(map(ast.unparse, target.elts), map(read_by, value.elts), strict=True))
    return not all(
        any(name in theirs or other in ours for other, theirs in pairs if other != name) for name, ours in pairs
    )


def read_by(value):
    """Return the names and attributes that an expression reads."""
    return {ast.unparse(each) for each in ast.walk(value) if isinstance(each, ast.Name | ast.Attribute)}


def fields_by_position(node):
    """Return the fields of a record that may be given by position."""
    options = [keyword for each in node.decorator_list if isinstance(each, ast.Call) for keyword in each.keywords]
    if any(each.arg == "kw_only" for each in [*options, *node.keywords]):
        return []
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    kinds = [ast.unparse(each.annotation) for each in fields]
    leading = fields[: kinds.index("KW_ONLY")] if "KW_ONLY" in kinds else fields
    return [each.target.id for each in leading if "ClassVar" not in ast.unparse(each.annotation)]


def records():
    """Yield each dataclass, and each struct of msgspec."""
    structs = {"Struct"}
    classes = [node for _, node in definitions(ast.ClassDef)]
    while found := {each.name for each in classes if structs & bases_of(each)} - structs:
        structs |= found
    for each in classes:
        if each.name in structs or any("dataclass" in ast.unparse(decorator) for decorator in each.decorator_list):
            yield each


def bases_of(node):
    return {ast.unparse(each).rpartition(".")[2] for each in node.bases}


@cache
def every_call():
    return [(name_of(path), *each) for path in FILES for each in calls(tree_of(path))]


def places(is_wrong):
    """Return the place of each call of which a function of the call and its varargs says that it is wrong."""
    return [f"{name}:{call.lineno}" for name, call, varargs in every_call() if is_wrong(call, varargs)]


def test_many_arguments_are_given_by_keyword():
    assert places(lambda call, _: len(call.args) > MOST_BY_POSITION) == []


def test_no_splat_is_among_other_arguments():
    assert places(splats_among_others) == []
    assert places(lambda call, _: splats_a_list_of_arguments(call)) == []


def test_each_attribute_has_its_own_statement():
    files = [(path, node) for path in FILES for node in ast.walk(tree_of(path)) if isinstance(node, ast.Assign)]
    assert [f"{name_of(path)}:{node.lineno}" for path, node in files if bundles(node)] == []


def test_records_of_many_fields_are_made_by_keyword():
    by_position = {each.name for each in records() if len(fields_by_position(each)) > FEW_FIELDS}
    assert by_position == BY_POSITION.keys()


def test_named_tuples_of_many_fields_are_made_by_keyword():
    tuples = [node for _, node in definitions(ast.ClassDef) if "NamedTuple" in bases_of(node)]
    long = {node.name for node in tuples if len(fields_by_position(node)) > MOST_OF_A_TUPLE}

    def is_made_by_position(call, _):
        return len(call.args) > MOST_OF_A_TUPLE and ast.unparse(call.func).rpartition(".")[2] in long

    assert places(is_made_by_position) == []


def test_the_rules_see_what_they_are_for():
    found = defaultdict(list)
    code = "f(a, *b); f(*b); f(*[a, *b]); f(*(a, b)); (lambda *args: f(a, *args))"
    for call, varargs in calls(ast.parse(code)):
        found["among"] += [ast.unparse(call)] * splats_among_others(call, varargs)
        found["list"] += [ast.unparse(call)] * splats_a_list_of_arguments(call)
    assert found == {"among": ["f(a, *b)"], "list": ["f(*(a, b))"]}
    swaps = "a.x, a.y = a.y, 0; b, a.x = a.x, None; a.x, a.y = f()"
    bundled = "a.x, a.y = 0, 1; a.x, b = 0, c; b, a.x, a.y = a.x, None, 0"
    assert not any(map(bundles, ast.parse(swaps).body))
    assert all(map(bundles, ast.parse(bundled).body))
