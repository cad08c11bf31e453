"""One rank of a contender with paceline, started by torchrun: rank 0 is the server, every other one a worker.

The evaluator computes only when the cores are idle, because evaluations are not charged to a run.
"""

from __future__ import annotations

import json
import os
import sys

import paceline as pl
from papers.ddp.real import Order, measured
from papers.tasks import Where


def main() -> None:
    order = Order.of(sys.argv[1])
    cluster = pl.Torchrun(threads=1, slowness=order.task.sleeping)
    if cluster.ranks.sidecar is not None:
        os.nice(19)
    result = order.task.train(cluster, Where(order.folder, updates=order.updates))
    if cluster.is_server:
        order.out.write_text(json.dumps(measured(result)))


if __name__ == "__main__":
    main()
