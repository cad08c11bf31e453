"""`paceline run`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated
from uuid import uuid4

import typer

from paceline.cli.options import check_not_empty, free_folder
from paceline.clusters.job_token import make_token
from paceline.clusters.launch_env import TOKEN, has_rank
from paceline.clusters.launch_settings import LaunchSettings
from paceline.clusters.placement import LOOPBACK
from paceline.errors import UsageError
from paceline.probe.launch import injection
from paceline.recording.callbacks.prometheus import Prometheus
from paceline.recording.run_folder import check_free
from paceline.shares.protocol import settings_of

EXAMPLE = "paceline run --nproc-per-node 4 train.py"


def run(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="Script, and its arguments.")],
    nproc_per_node: Annotated[int, typer.Option(min=1, help="Number of ranks on each host.")] = 1,
    nnodes: Annotated[int, typer.Option(min=1, help="Number of hosts.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="Number of this host; 0 for the host of rank 0.")] = 0,
    rdzv_endpoint: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the host of rank 0, and a free port there.")
    ] = "",
    max_restarts: Annotated[
        int, typer.Option(min=-1, help="Number of times that each rank is started again; -1 for no limit.")
    ] = -1,
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder with a file for the output of each rank. Default: the terminal.")
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")] = False,
    no_python: Annotated[bool, typer.Option("--no-python", help="SCRIPT is a program, not a Python script.")] = False,
    protocol: Annotated[
        str, typer.Option(help="How ranks of DDP and FSDP2 share the batches; bsp to leave them as they are.")
    ] = "balanced(m=8, leases=1)",
    max_share: Annotated[
        float | None, typer.Option(min=1, help="Largest share of a rank, as a multiple of its batch. Default: 1.5.")
    ] = None,
    weigh: Annotated[
        str, typer.Option(help="What a rank's gradient counts: samples, tokens or none. Default: read from the loss.")
    ] = "auto",
    cost: Annotated[
        str | None,
        typer.Option(metavar="FILE.npy", help="Cost of each sample, by which it is dealt, or none."),
    ] = None,
    on_death: Annotated[
        str, typer.Option(help="What follows the loss of a rank of DDP: the others survive, or all restart.")
    ] = "survive",
    dry_run: Annotated[bool, typer.Option(help="Say what is taken over, and end.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the shares and times of the ranks. Default: runs/SCRIPT-1, -2, ...")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the run in that folder.")] = False,
    metrics: Annotated[
        str | None, typer.Option(help="Serve metrics to Prometheus at PORT of 127.0.0.1, or at HOST:PORT, from rank 0.")
    ] = None,
) -> None:
    """Run a script as several ranks, and start a rank that ends again: paceline run --nproc-per-node 4 train.py.

    The options and the variables of the ranks are those of torchrun. When a rank is lost, the others go on. When rank 0
    is lost, all are started again, and the run goes on from its last checkpoint. Ranks of DDP on gloo go on without any
    rank, and replicas of HSDP without any replica; others of DDP and FSDP are all started again whichever is lost, and
    go on from the script's own checkpoint.
    """
    from paceline.launcher.launch import launch
    from paceline.shares.log_so_far import end_log

    check_not_empty(sys.argv[1 : -len(command)])  # an argument of the script may be empty
    words = _words(command, module=module, no_python=no_python)
    shares = settings_of(protocol, max_share=max_share, weigh=weigh, cost=cost, dry_run=dry_run, on_death=on_death)
    is_rank = has_rank(os.environ)
    if shares is None and (out or metrics) is not None:
        given = f"--out {out}" if out is not None else f"--metrics {metrics}"
        raise UsageError(f"{given}, but with --protocol {protocol} there are no shares to record: omit one of them")
    if metrics is not None:
        Prometheus.parse(metrics)  # which refuses what is no address
    if shares is not None:
        folder = _folder(out, command[0] if module else Path(command[0]).stem, overwrite=overwrite)
        name = os.environ.get("TORCHELASTIC_RUN_ID", "") if is_rank else uuid4().hex
        shares = replace(shares, out=str(folder), overwrite=overwrite, metrics=metrics, launch=name)
        os.environ.update({**injection(), **shares.environment()})
    if is_rank:
        _become_rank(context, words)
    host, port = _endpoint(rdzv_endpoint, nnodes)
    if node_rank >= nnodes and not rdzv_endpoint:  # with it, a host may join an elastic run
        raise UsageError(f"--node-rank {node_rank}, expected 0 to {nnodes - 1} with --nnodes {nnodes}")
    if log_dir is not None:
        if log_dir.exists() and not log_dir.is_dir():
            raise UsageError(f"--log-dir {log_dir} is no folder: give another one")
        log_dir.mkdir(parents=True, exist_ok=True)
    # All hosts need the same token, which only the user can give them.
    token = "" if nnodes > 1 or node_rank or os.environ.get(TOKEN) else make_token()
    settings = LaunchSettings(
        nproc_per_node=nproc_per_node,
        nnodes=nnodes,
        node_rank=node_rank,
        master=host,
        port=port,
        max_restarts=max_restarts,
        token=token,
    )
    status = launch(settings, words, log_dir)
    if shares is not None:
        end_log(folder, shares.launch, status)
    raise typer.Exit(status)


def _folder(out: Path | None, name: str, *, overwrite: bool) -> Path:
    """Return the folder of the run, as an absolute path.

    Raises:
        UsageError: it cannot be used.
    """
    if out is None:
        return free_folder(name).absolute()
    is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # then the folder is that of its own run
    if os.path.lexists(out) and not is_restarted:
        check_free(out, overwrite=overwrite)
    return out.absolute()


def _words(command: list[str], *, module: bool, no_python: bool) -> list[str]:
    """Return the command of a rank.

    Raises:
        UsageError: there is no such script, module or program.
    """
    name = command[0]
    if module and no_python:
        raise UsageError("--module and --no-python: a module is run by Python; give one of them")
    if no_python:
        if shutil.which(name) is None:
            raise UsageError(f"there is no program {name!r}: give a program, or omit --no-python for a Python script")
        return command
    if module:
        if not _is_module(name):
            raise UsageError(f"there is no module {name!r}: give a module, or omit --module for the path of a script")
        # paceline is not in the working directory, so that a file there, as queue.py, may hide no module of Python.
        safe = ["-P"] if name == "paceline" else []
        return [sys.executable, "-u", *safe, "-m", *command]
    if not (Path(name).is_file() or (Path(name) / "__main__.py").is_file()):
        raise UsageError(f"there is no file {name!r}: give a script, as {EXAMPLE}")
    return [sys.executable, "-u", *command]


def _is_module(name: str) -> bool:
    """Return whether Python finds a module, or the package that it belongs to, from this folder."""
    sys.path.insert(0, os.getcwd())
    try:
        # A search for the whole name would execute the package.
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.pop(0)


def _endpoint(text: str, nnodes: int) -> tuple[str, int]:
    """Return host and port at which the ranks meet; port 0 for a free one.

    Raises:
        UsageError: it is missing or invalid.
    """
    if not text and nnodes == 1:
        return LOOPBACK, 0
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        given = f"--rdzv-endpoint {text!r}" if text else f"--nnodes {nnodes} without --rdzv-endpoint"
        raise UsageError(
            f"{given}: give the address of the host of rank 0 and a free port there, the same on every host, as "
            "--rdzv-endpoint 10.0.0.1:29400"
        )
    return host, int(port)


def _become_rank(context: typer.Context, words: list[str]) -> None:
    """Become the rank that another launcher has started, if no other ranks are asked for.

    Raises:
        UsageError: an option is given that another launcher has decided.
    """
    for name in ("nproc_per_node", "nnodes", "node_rank", "rdzv_endpoint", "max_restarts"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                f"--{name.replace('_', '-')}, but this process is rank {os.environ['RANK']} of another launcher: omit "
                f"it, or unset RANK and WORLD_SIZE"
            )
    os.execvp(words[0], words)
