"""Links of the API pages: an object is found under its public name, wherever its module is."""

from importlib import import_module

SPACES = ("callbacks", "controllers", "jobs", "plans", "results", "theory", "timing")
NAMESPACES = ("paceline", *(f"paceline.{space}" for space in SPACES))


def public_names():
    """Return the full public names, by the short name and by the place of the definition."""
    names = {}
    for namespace in NAMESPACES:
        module = import_module(namespace)
        for name in module.__all__:
            public = getattr(module, name)
            full = f"{namespace}.{name}"
            names.setdefault(name, full)
            if hasattr(public, "__qualname__"):
                names.setdefault(f"{public.__module__}.{public.__qualname__}", full)
    return names


def documented_name(target, names, documented):
    """Return the documented name that a reference means; None for none.

    A member that has no entry of its own, such as a field of a dataclass, leads to its class.

    Args:
        target: text of the reference, for example ``pl.train``, ``Job.step`` or ``paceline.run.result.Result``.
        names: result of `public_names`.
        documented: names of all entries.
    """
    target = target.replace("pl.", "paceline.", 1) if target.startswith("pl.") else target
    owner, _, member = target.rpartition(".")
    whole, part = _entry(target, names, documented), _entry(owner, names, documented)
    return whole or (f"{part}.{member}" if f"{part}.{member}" in documented else part)


def _entry(name, names, documented):
    """Return the entry of an object by its full name, its public name or, if unique, its last part; None for none."""
    last = [entry for entry in documented if "." not in name and entry.endswith(f".{name}")]
    places = (name, names.get(name), definition(name), *(last if len(last) == 1 else ()))
    return next((place for place in places if place in documented), None)


def definition(name):
    """Return the place of the definition of a name that another module imports; None for no such name.

    >>> definition("paceline.core.records.DecisionMade")
    'paceline.core.decision.DecisionMade'
    """
    place, _, last = name.rpartition(".")
    try:
        found = getattr(import_module(place), last)
        return f"{found.__module__}.{found.__qualname__}"
    except (ImportError, AttributeError, ValueError):
        return None


def resolve(app, env, node, contnode):
    """Link a Python reference that Sphinx has not found."""
    if node.get("refdomain") != "py":
        return None
    domain = env.domains["py"]
    name = documented_name(node["reftarget"], app.public_names, domain.objects)
    if name is None:
        return None
    kind = "mod" if domain.objects[name].objtype == "module" else "obj"
    return domain.resolve_xref(env, node["refdoc"], app.builder, kind, name, node, contnode)


def setup(app):
    """Register the handler."""
    app.public_names = public_names()
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
