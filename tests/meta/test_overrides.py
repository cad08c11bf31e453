"""Methods of engines and attached loops that override a concrete method, of which there are to be fewer."""

import ast
from functools import cache

from source_tree import definitions, name_of

ROOMS = ("engines/", "user_loop/")
MOST = 2


@cache
def is_abstract(method):
    return any("abstractmethod" in ast.unparse(each) for each in method.decorator_list)


def is_concrete_in(classes, name, method):
    """Say whether a class of this name, or the nearest of its bases, defines a method that is not abstract."""
    if name not in classes:
        return False
    own = [each for each in methods(classes[name]) if each.name == method]
    if own:
        return not is_abstract(own[0])
    return any(is_concrete_in(classes, base, method) for base in bases(classes[name]))


@cache
def methods(node):
    return [each for each in node.body if isinstance(each, ast.FunctionDef)]


@cache
def bases(node):
    return [ast.unparse(each).partition("[")[0].rpartition(".")[2] for each in node.bases]


def overrides():
    """Yield each method of these packages that overrides a concrete one of paceline."""
    classes = {node.name: node for _, node in definitions(ast.ClassDef)}
    for path, node in definitions(ast.ClassDef):
        if name_of(path).startswith(ROOMS):
            for each in methods(node):
                if each.name != "__init__" and any(is_concrete_in(classes, base, each.name) for base in bases(node)):
                    yield f"{name_of(path)}: {node.name}.{each.name}"


def test_few_methods_override_a_concrete_one():
    assert len(list(overrides())) <= MOST


def test_no_class_inherits_from_a_loop():
    ends = [node.name for _, node in definitions(ast.ClassDef) if {"RunLoop", "RankRun", "Standby"} & set(bases(node))]
    assert ends == []
