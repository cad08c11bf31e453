"""Pictures of protocols: the first ten updates on one simulated cluster, drawn by paceline when the site is built."""

import logging
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import paceline as pl
from paceline.recording.run_folder import SavedRun
from paceline.report.figures import figure_class
from paceline.report.run_data import read_run
from paceline.report.task_timeline import UPDATES, draw_tasks

FOLDER = "_generated"
PROTOCOLS = {
    "bsp": "bsp",
    "k-sync": "k_sync(k=3)",
    "k-async": "k_async(k=3)",
    "asp": "asp",
    "dbw": "dbw",
    "dc-s3gd": "dc_s3gd",
}
CLUSTER = pl.Cluster(
    4, pl.timing.Gamma(shape=8, mean_s=1.0), speed=[1, 1, 1, 1 / 3], network=pl.timing.Network(latency_s=0.05)
)
INK = {"light": "#202428", "dark": "#d4d8dc"}


def linear_job():
    """Return a job that trains in milliseconds: a linear model of eight inputs."""
    inputs, weights = torch.randn(512, 8, generator=torch.manual_seed(0)), torch.arange(8.0)[:, None]
    data = torch.utils.data.TensorDataset(inputs, inputs @ weights)
    optimizer = partial(torch.optim.SGD, lr=0.02)
    loss = torch.nn.functional.mse_loss
    return pl.Job(model=torch.nn.Linear(8, 1), optimizer=optimizer, data=data, batch_size=16, loss=loss)


def run_of(protocol, folder):
    """Return the data of a run of ten updates."""
    pl.train(linear_job(), protocol=protocol, cluster=CLUSTER, stop=pl.Stop(updates=UPDATES), out=folder)
    return read_run(SavedRun(folder), protocol)


def draw(run, ink, file):
    """Draw a run with text of one colour on no background."""
    from matplotlib import rc_context

    colours = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), ink)
    with rc_context({**colours, "svg.hashsalt": "paceline", "svg.fonttype": "none", "hatch.linewidth": 0.6}):
        figure = figure_class()(layout="constrained")
        draw_tasks(figure, run)
        figure.savefig(file, transparent=True, metadata={"Date": None})


def write_pictures(app):
    """Write a picture of each protocol for each theme, unless they are newer than the source of paceline."""
    folder = Path(app.srcdir, FOLDER)
    folder.mkdir(exist_ok=True)
    pictures = [folder / f"{name}-{theme}.svg" for name in PROTOCOLS for theme in INK]
    code = [Path(__file__), *Path(pl.__file__).parent.rglob("*.py")]
    if all(picture.exists() for picture in pictures) and _newest_s(code) < min(map(_changed_s, pictures)):
        return
    logging.getLogger("paceline").setLevel(logging.WARNING)  # Sphinx shows the log of every package
    with TemporaryDirectory() as runs:
        for name, protocol in PROTOCOLS.items():
            run = run_of(protocol, Path(runs, name))
            for theme, ink in INK.items():
                draw(run, ink, folder / f"{name}-{theme}.svg")


def _changed_s(path):
    return path.stat().st_mtime


def _newest_s(paths):
    return max(map(_changed_s, paths))


def setup(app):
    """Write the pictures before the pages are read."""
    app.connect("builder-inited", write_pictures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
