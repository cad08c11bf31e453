"""Parser of cluster texts, ``16*exp(mean=1)`` or ``local:4``, and of cluster files in TOML."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from paceline.clusters.local import LocalCluster
from paceline.clusters.ray import Ray
from paceline.clusters.simulated import Cluster
from paceline.clusters.timing.distributions import Distribution, parse_distribution
from paceline.clusters.timing.lease_time import LeaseTime
from paceline.clusters.timing.network import Network, ServerTime
from paceline.clusters.timing.slowdowns import Periodic, Slowdown, Transient
from paceline.clusters.timing.trace import Trace
from paceline.clusters.torchrun import Torchrun
from paceline.ddp_recording.as_trace import read_trace_of
from paceline.ddp_recording.recording import is_recording
from paceline.errors import UsageError, describe_read_error, did_you_mean
from paceline.utils.files import ContentError, read_toml
from paceline.utils.spec_parser import Call, bind, parse_call, split_top

Schema = Mapping[str, "Schema"]

_TABLES: Mapping[str, Callable[..., object]] = {
    "slowdown": Slowdown,
    "periodic": Periodic,
    "transient": Transient,
    "network": Network,
    "server": ServerTime,
    "leases": LeaseTime,
}
MOST_WORKERS = 1_000_000
_LAUNCHED: Mapping[str, Callable[..., Torchrun | Ray]] = {"torchrun": Torchrun, "ray": Ray}
_ARGUMENTS = {"workers": "n"}
_SLOWDOWNS = ("slowdown", "periodic")  # tables that may be repeated
_KNOBS: Schema = {name: {knob: {} for knob in signature(table).parameters} for name, table in _TABLES.items()}
_SLOWNESS: Schema = {"timing": {}, "speed": {}, **_KNOBS}
_CLUSTER: Schema = {"workers": {}, "device": {}, **_SLOWNESS}
_LOCAL: Schema = {
    "local": {"workers": {}, "device": {}, "respawn": {}, "threads": {}, "debug": {}, "deterministic": {}},
    "slowness": _SLOWNESS,
}


def parse_cluster(text: str, censored: Literal["km"] | None = None) -> Cluster | LocalCluster | Torchrun | Ray:
    """Parse a cluster as typed on the command line.

    Args:
        text: cluster text, for example ``16*exp(mean=1)``, ``local:4``, ``torchrun``, ``torchrun(address=10.0.0.1)``,
            ``ray(workers=8)``, ``trace:FILE``, ``trace(file=FILE, by=time)`` or ``FILE.toml``. FILE may be the folder
            of a DDP recording.
        censored: rule for the duration of censored work of a trace, as in `Trace`; None for none.

    Raises:
        UsageError: the text or the file is not a cluster.

    >>> parse_cluster("4*exp(mean=1) + 4*exp(mean=5)").n
    8
    >>> parse_cluster("local:4").n
    4
    """
    cluster = _parse(text)
    return cluster if censored is None else _with_censored(cluster, censored)


def _parse(text: str) -> Cluster | LocalCluster | Torchrun | Ray:
    if _is_trace(text):
        trace = _trace(text)
        return Cluster(trace.workers, trace)
    if text.endswith(".toml"):
        return load_cluster(text)
    if _names(text, _LAUNCHED):
        return bind(parse_call(text, "torchrun(shards=2)"), _LAUNCHED)
    if text.startswith("local:"):
        return LocalCluster(_count(text.removeprefix("local:"), text))
    groups = [_group(part, text) for part in split_top(text, "+")]
    if len(groups) == 1:
        return Cluster(*groups[0])
    distributions = [distribution for count, distribution in groups for _ in range(count)]
    return Cluster(len(distributions), distributions)


def _with_censored(
    cluster: Cluster | LocalCluster | Torchrun | Ray, censored: Literal["km"]
) -> Cluster | LocalCluster | Torchrun | Ray:
    if isinstance(cluster, LocalCluster) and cluster.slowness is not None:
        slowness = _with_censored(cluster.slowness, censored)
        assert isinstance(slowness, Cluster)
        return replace(cluster, slowness=slowness)
    if isinstance(cluster, Cluster) and isinstance(cluster.timing, Trace):
        return replace(cluster, timing=replace(cluster.timing, censored=censored))
    raise UsageError(
        f'censored="{censored}" applies to the rows of a trace: give cluster="trace:FILE", or omit censored'
    )


def without_launcher(cluster: Cluster | LocalCluster | Torchrun | Ray, what: str) -> Cluster | LocalCluster:
    """Return a cluster of this machine; raise a UsageError for the processes of a launcher, which make one run only."""
    if isinstance(cluster, Torchrun | Ray):
        others = "ranks of torchrun" if isinstance(cluster, Torchrun) else "actors of Ray"
        raise UsageError(f"{what} makes several runs, but {others} make one; give local:4 or 4*exp(mean=1)")
    return cluster


def is_torchrun(text: str) -> bool:
    """Return whether a cluster text names the processes that torchrun starts."""
    return _names(text, ["torchrun"])


def _names(text: str, calls: Iterable[str]) -> bool:
    return re.match(rf"\s*({'|'.join(calls)})\s*(\(|$)", text) is not None


def _is_trace(text: str) -> bool:
    return re.match(r"\s*trace\s*[:(]", text) is not None


def _trace(text: str) -> Trace:
    colon = text.strip().startswith("trace:")
    call = (
        Call("trace", {"file": text.partition(":")[2].strip()}) if colon else parse_call(text, "trace(file=times.csv)")
    )
    return bind(call, {"trace": _read_trace})


def _read_trace(file: str, *, by: Literal["draw", "time"] = "draw", censored: Literal["km"] | None = None) -> Trace:
    """Read a trace from its CSV file, or from the folder of a DDP recording."""
    if is_recording(file):
        return replace(read_trace_of(file), by=by, censored=censored)
    return Trace.from_csv(file, by=by, censored=censored)


def _group(part: str, text: str) -> tuple[int, Distribution]:
    count, star, distribution = part.partition("*")
    if not star:
        examples = "type 16*exp(mean=1), local:4, torchrun, ray(workers=4), trace:FILE, or a file.toml"
        raise UsageError(f"{part.strip()!r} is not a group of workers: {examples}")
    return _count(count, text), parse_distribution(distribution)


def _count(count: str, text: str) -> int:
    if not count.strip().isdecimal() or int(count) == 0:
        raise UsageError(
            f"{count.strip()!r} in {text!r} is not a number of workers: type 1 or more, as in 16*exp(mean=1) or local:4"
        )
    if int(count) > MOST_WORKERS:
        raise UsageError(f"{count.strip()[:20]} workers in {text[:40]!r}: type at most {MOST_WORKERS}")
    return int(count)


def load_cluster(path: str | Path) -> Cluster | LocalCluster:
    """Read a cluster from a TOML file; one with a ``[local]`` table is a `LocalCluster`.

    The keys are the arguments of `Cluster`: ``workers`` (its ``n``), ``timing`` and ``speed`` (one, or a list of n),
    any number of tables ``[[slowdown]]`` and ``[[periodic]]``, and the tables ``[transient]``, ``[network]``,
    ``[server]`` and ``[leases]``. A file with ``[local]`` (workers, device, respawn, threads, debug, deterministic) may
    have a table ``[slowness]`` with the same keys except ``workers``. With ``timing = "trace:FILE"`` the trace sets the
    number of workers.

    Raises:
        UsageError: the file cannot be read, or is not a cluster; with the line of an unknown key.
    """
    try:
        text, tables = read_toml(path)
    except (OSError, ContentError) as error:
        raise UsageError(f"cannot read the cluster file {path}: {describe_read_error(error)}") from error
    is_local = "local" in tables
    for header, key, known in _unknown_keys(tables, _LOCAL if is_local else _CLUSTER):
        where = f"{path}, line {_line(text, header, key)}"
        raise UsageError(f"{where}: {key!r} is not known{did_you_mean(key, known)}")
    try:
        return _local(tables) if is_local else _cluster(tables)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _cluster(tables: Mapping[str, Any]) -> Cluster:
    others = {key: value for key, value in tables.items() if key not in _SLOWDOWNS}
    given: dict[str, Any] = {_ARGUMENTS.get(key, key): _read(key, value) for key, value in others.items()}
    given["slowdowns"] = [each for key in _SLOWDOWNS for each in _repeated(key, tables.get(key, []))]
    if isinstance(given.get("timing"), Trace):
        given.setdefault("n", given["timing"].workers)
    if "n" not in given:
        raise UsageError("the number of workers is missing: add for example workers = 16")
    return Cluster(**given)


def _local(tables: Mapping[str, Any]) -> LocalCluster:
    local = _table("local", tables["local"])
    if "workers" not in local:
        raise UsageError("the number of workers is missing: add for example workers = 4 under [local]")
    given = {_ARGUMENTS.get(key, key): value for key, value in local.items()}
    if "slowness" in tables:
        given["slowness"] = _cluster({**_table("slowness", tables["slowness"]), "workers": given["n"]})
    return LocalCluster(**given)


def _read(key: str, value: Any) -> object:
    if key == "timing":
        return [_timing(each) for each in value] if isinstance(value, list) else _timing(value)
    return bind(Call(key, _table(key, value)), _TABLES) if key in _TABLES else value


def _repeated(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise UsageError(f"{key} is a list of tables: type [[{key}]]")
    return [bind(Call(key, _table(key, each)), _TABLES) for each in value]


def _timing(value: object) -> Distribution | Trace:
    if not isinstance(value, str):
        raise UsageError(f'timing={value!r} is not text: type for example timing = "exp(mean=1)"')
    return _trace(value) if _is_trace(value) else parse_distribution(value)


def _table(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{key} is not a table: type [{key}] and its keys below")
    return value


def _unknown_keys(table: Mapping[str, Any], schema: Schema, header: str = "") -> Iterator[tuple[str, str, Schema]]:
    for key, value in table.items():
        if key not in schema:
            yield header, key, schema
        elif schema[key]:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, dict):
                    yield from _unknown_keys(child, schema[key], f"{header}.{key}".lstrip("."))


def _line(text: str, header: str, key: str) -> int:
    """Return the line of the first such key below its header, because tomllib reports no line numbers.

    The first one is right: an earlier table of this header with this key would have been reported before.
    """
    table = re.search(rf"^\s*\[+\s*{re.escape(header)}\s*\]", text, re.MULTILINE)
    start = table.start() if table and header else 0
    found = re.compile(rf"(?:^|[{{,\[.])\s*[\"']?{re.escape(key)}[\"']?\s*[=.\]]", re.MULTILINE).search(text, start)
    return text.count("\n", 0, found.end() if found else start) + 1
