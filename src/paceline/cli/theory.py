"""`paceline theory`."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import Format, Output, Overwrite, check_out, quorums
from paceline.errors import RunError, UsageError
from paceline.utils.wording import counted

if TYPE_CHECKING:
    from paceline.clusters.simulated import Cluster
    from paceline.protocols.protocol import Plan, Protocol
    from paceline.theory import Constants, Tradeoff

PICTURES = (".svg", ".png", ".pdf")
POINTS = 400
FLAT = 5.0  # the slowest error has come within exp(-5) of its floor


def theory(
    protocols: Annotated[str, typer.Option(help="As 'bsp, k_sync(k=4), asp'; with --k, as 'k_sync, k_async'.")],
    cluster: Annotated[str, typer.Option(help="A simulated one, as '16*exp(mean=1)' or cluster.toml.")],
    k: Annotated[str | None, typer.Option("--k", help="As 1,4,8: each of them where a k is left out.")] = None,
    constants: Annotated[
        str | None,
        typer.Option(
            help="As L=1,c=0.5,sigma2=1,gamma=0.2 (and M_G, m, initial_error), or a run with --measure-steps."
        ),
    ] = None,
    eta: Annotated[float | None, typer.Option(help="Learning rate; the largest that all may have if left out.")] = None,
    seconds: Annotated[float | None, typer.Option(help="To look ahead; until the error is flat if left out.")] = None,
    out: Annotated[Path | None, typer.Option(help="Picture of the error against time: .svg, .png or .pdf.")] = None,
    overwrite: Overwrite = False,
    updates: Annotated[int, typer.Option(min=1, help="To simulate where there is no theory.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="Of that simulation.")] = 0,
    output: Output = Format.TEXT,
) -> None:
    """Say what to expect of protocols: seconds per update, staleness, and error against time."""
    from paceline.cli.theory_table import as_text, predict

    _check_needs_constants(constants, {"--eta": eta, "--seconds": seconds, "--out": out})
    if out is not None:
        _check_picture(out, overwrite)
    workers, plans = _simulated(cluster), _plans(protocols, k)
    if constants is not None:
        _check_bounds(plans, eta, seconds)
    rows = [predict(plan, workers, updates, seed) for plan in plans]
    curves = None
    if constants is not None:
        given = _constants(constants)
        bounded = [
            row.protocol
            for row, plan in zip(rows, plans, strict=True)
            if row.has_theory and plan.reduction is None  # whose time is not that of its knobs alone
        ]
        curves = _curves(bounded, workers, given, eta, seconds)
    if out is not None and curves is not None:
        _draw(curves, out)
    if output is Format.JSON:
        told = {"protocols": [row.as_json() for row in rows], **({"error": _as_json(curves)} if curves else {})}
        print(json.dumps(told, allow_nan=False))
    else:
        print(as_text(rows, curves, f"{counted(updates, 'update')}, seed {seed}"), end="")
        if out is not None:
            print(f"The curves are in {out}.")


def _constants(text: str) -> Constants:
    """Read constants, or estimate them from the run in that folder."""
    from paceline import estimate_constants
    from paceline.theory import Constants
    from paceline.utils.spec_parser import bind, parse_call

    if "=" in text:
        return bind(parse_call(f"constants({text})"), {"constants": Constants})
    return estimate_constants(text)


def _check_needs_constants(constants: str | None, options: dict[str, object]) -> None:
    for option, value in options.items():
        if value is not None and constants is None:
            raise UsageError(f"{option} is about the error, which needs --constants, as --constants L=1,c=0.5,sigma2=1")


def _check_bounds(plans: list[Plan], eta: float | None, seconds: float | None) -> None:
    from paceline.utils.validation import check_range

    check_range(
        "(0, inf)", **{name: value for name, value in (("eta", eta), ("seconds", seconds)) if value is not None}
    )
    for plan in plans:
        if any(phase.compensators for phase in plan.phases):
            raise UsageError(
                f"{plan}: no bound on the error knows of a compensator; leave it out, or leave out --constants"
            )


def _check_picture(out: Path, overwrite: bool) -> None:
    from paceline.report.figures import figure_class

    if out.suffix not in PICTURES:
        raise UsageError(f"--out {out}, expected a picture: {', '.join(PICTURES)}")
    check_out(out, overwrite)
    figure_class()


def _simulated(text: str) -> Cluster:
    from paceline.clusters.parser import parse_cluster
    from paceline.clusters.simulated import Cluster

    cluster = parse_cluster(text)
    if not isinstance(cluster, Cluster):
        raise UsageError(f"{text} runs in real time; give a simulated cluster such as '4*exp(mean=1)'")
    return cluster


def _plans(protocols: str, k: str | None) -> list[Plan]:
    """Read the protocols, with each k where one has a k that was left out."""
    from paceline.catalogue.parser import parse_plan
    from paceline.catalogue.protocols import CATALOGUE
    from paceline.utils.spec_parser import split_top

    texts: list[str] = []
    for text in (part.strip() for part in split_top(protocols, ",")):
        lacks_k = text in CATALOGUE and "k" in signature(CATALOGUE[text]).parameters
        texts += [f"{text}(k={each})" for each in quorums(k)] if k is not None and lacks_k else [text]
    return [parse_plan(text) for text in texts]


def _curves(
    protocols: list[Protocol], cluster: Cluster, constants: Constants, eta: float | None, seconds: float | None
) -> Tradeoff:
    import numpy as np

    from paceline.theory import expected, max_learning_rate, tradeoff
    from paceline.utils.validation import check_range

    runtimes = [expected(protocol, cluster) for protocol in protocols]
    if not runtimes:
        raise UsageError("none of these protocols has a theory of its error; leave out --constants, or add bsp")
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
    try:
        figure.savefig(out)
    except OSError as error:
        raise RunError(f"cannot write {out}: {error.strerror}") from error
