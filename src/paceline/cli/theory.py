"""`paceline theory`."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import Format, Output, Overwrite, check_out, quorums
from paceline.errors import UsageError
from paceline.utils.files import writing
from paceline.utils.wording import counted

if TYPE_CHECKING:
    from paceline.clusters.simulated import Cluster
    from paceline.protocols.protocol import Plan, Protocol
    from paceline.theory import Constants, Tradeoff

PICTURES = (".svg", ".png", ".pdf")
POINTS = 400
FLAT = 5.0  # time constants after which the slowest error is within exp(-5) of its floor


def theory(
    protocols: Annotated[
        str, typer.Option(help="Protocols, for example 'bsp, k_sync(k=4), asp', or 'k_sync, k_async' with --k.")
    ],
    cluster: Annotated[str, typer.Option(help="Simulated cluster, for example '16*exp(mean=1)' or cluster.toml.")],
    k: Annotated[
        str | None, typer.Option("--k", help="Quorums for protocols given without k, for example 1,4,8.")
    ] = None,
    constants: Annotated[
        str | None,
        typer.Option(
            help="L=1,c=0.5,sigma2=1,gamma=0.2 (also M_G, m, initial_error), or the folder of a run with "
            "--measure-steps."
        ),
    ] = None,
    eta: Annotated[
        float | None, typer.Option(help="Learning rate. Default: the largest that is valid for all protocols.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Time horizon of the curves. Default: until the error is flat.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Plot of error against time to write: .svg, .png or .pdf.")] = None,
    overwrite: Overwrite = False,
    updates: Annotated[int, typer.Option(min=1, help="Simulated updates, for protocols without theory.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the simulation.")] = 0,
    output: Output = Format.TEXT,
) -> None:
    """Predict seconds per update, staleness, and error against time of protocols."""
    from paceline.cli.theory_table import as_text, predict

    _check_needs_constants(constants, {"--eta": eta, "--seconds": seconds, "--out": out})
    if out is not None:
        _check_picture(out, overwrite)
    workers, plans = _simulated_cluster(cluster), _plans(protocols, k)
    if constants is not None:
        _check_bounds(plans, eta, seconds)
    rows = [predict(plan, workers, updates, seed) for plan in plans]
    curves = None
    if constants is not None:
        given = _constants(constants)
        bounded = [
            row.protocol
            for row, plan in zip(rows, plans, strict=True)
            if row.has_theory and plan.allreduce is None  # an all-reduce sum also takes time
        ]
        curves = _curves(bounded, workers, given, eta, seconds)
    if out is not None and curves is not None:
        _draw(curves, out)
    if output is Format.JSON:
        result = {"protocols": [row.as_json() for row in rows], **({"error": _as_json(curves)} if curves else {})}
        print(json.dumps(result, allow_nan=False))
    else:
        print(as_text(rows, curves, f"{counted(updates, 'update')}, seed {seed}"), end="")
        if out is not None:
            print(f"Curves written to {out}.")


def _constants(text: str) -> Constants:
    """Parse constants, or estimate them from the run in that folder."""
    from paceline.results import estimate_constants
    from paceline.theory import Constants
    from paceline.utils.spec_parser import bind, parse_call

    if "=" in text:
        return bind(parse_call(f"constants({text})", "constants(L=1,c=0.5,sigma2=1)"), {"constants": Constants})
    return estimate_constants(text)


def _check_needs_constants(constants: str | None, options: dict[str, object]) -> None:
    for option, value in options.items():
        if value is not None and constants is None:
            raise UsageError(f"{option} needs --constants, for example --constants L=1,c=0.5,sigma2=1")


def _check_bounds(plans: list[Plan], eta: float | None, seconds: float | None) -> None:
    from paceline.utils.validation import check_range

    check_range(
        "(0, inf)", **{name: value for name, value in (("eta", eta), ("seconds", seconds)) if value is not None}
    )
    for plan in plans:
        if any(phase.compensators for phase in plan.phases):
            raise UsageError(f"{plan}: there is no error bound with a compensator; remove it, or remove --constants")


def _check_picture(out: Path, overwrite: bool) -> None:
    from paceline.report.figures import figure_class

    if out.suffix not in PICTURES:
        raise UsageError(f"--out {out}, expected a picture: {', '.join(PICTURES)}")
    check_out(out, overwrite)
    figure_class()  # fail before the long part


def _simulated_cluster(text: str) -> Cluster:
    from paceline.clusters.parser import parse_cluster
    from paceline.clusters.simulated import Cluster

    cluster = parse_cluster(text)
    if not isinstance(cluster, Cluster):
        raise UsageError(f"{text} runs in real time; give a simulated cluster such as '4*exp(mean=1)'")
    return cluster


def _plans(protocols: str, k: str | None) -> list[Plan]:
    """Parse the protocols; a protocol given without its k is repeated for each quorum."""
    from paceline.catalogue.parser import parse_plan
    from paceline.catalogue.protocols import CATALOGUE
    from paceline.utils.spec_parser import split_top

    counts = None if k is None else quorums(k)
    texts: list[str] = []
    for text in (part.strip() for part in split_top(protocols, ",")):
        lacks_k = text in CATALOGUE and "k" in signature(CATALOGUE[text]).parameters
        texts += [f"{text}(k={each})" for each in counts] if counts is not None and lacks_k else [text]
    return [parse_plan(text) for text in texts]


def _curves(
    protocols: list[Protocol], cluster: Cluster, constants: Constants, eta: float | None, seconds: float | None
) -> Tradeoff:
    import numpy as np

    from paceline.theory import expected, max_learning_rate, tradeoff
    from paceline.utils.validation import check_range

    runtimes = [expected(protocol, cluster) for protocol in protocols]
    if not runtimes:
        raise UsageError("none of these protocols has an error bound; remove --constants, or add bsp")
    rate = eta if eta is not None else max_learning_rate(constants, min(runtime.k for runtime in runtimes))
    slowest_s = max(runtime.seconds_per_update for runtime in runtimes)
    end_s = seconds if seconds is not None else FLAT * slowest_s / (rate * constants.c) if constants.c and rate else 1.0
    check_range("(0, inf)", seconds=end_s)
    return tradeoff(protocols, cluster, constants, rate, np.linspace(0, end_s, POINTS))


def _as_json(curves: Tradeoff) -> dict[str, Any]:
    return {
        "times_s": curves.times_s.tolist(),
        "bounds": {name: errors.tolist() for name, errors in curves.errors.items()},
        "best": curves.best,
        "simulated": curves.simulated,
    }


def _draw(curves: Tradeoff, out: Path) -> None:
    from paceline.report.figures import COLOURS, DASHES, figure_class

    figure = figure_class()(figsize=(7, 4), layout="constrained", dpi=150)
    axes = figure.subplots()
    for number, (name, errors) in enumerate(curves.errors.items()):
        dashes = DASHES[number // len(COLOURS) % len(DASHES)]
        axes.plot(curves.times_s, errors, linestyle=dashes, color=COLOURS[number % len(COLOURS)], label=name)
    axes.set(xlabel="seconds", ylabel="bound on the error", yscale="log")
    figure.legend(loc="outside right upper", fontsize="small")
    with writing(out):
        figure.savefig(out)
