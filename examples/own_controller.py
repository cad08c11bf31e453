"""Controller of your own: choose the quorum while training runs."""

import paceline as pl


def growing_quorum(observation: pl.controllers.Observation) -> int:
    """Return a quorum of two gradients at first, one more every 100 updates, at most all workers."""
    return min(observation.live, 2 + observation.version // 100)


if __name__ == "__main__":
    cluster = pl.Cluster(8, timing=pl.timing.ShiftedExponential(shift_s=0.3, mean_s=0.7))
    grow = pl.k_sync(k=2).controlled_by(pl.controllers.QuorumFunction(growing_quorum))
    result = pl.train(pl.jobs.digits(), protocol=grow, cluster=cluster, stop=pl.Stop(loss=0.2))
    k = result.history.columns()["k"]
    print(f"k went from {k[0]} to {k[-1]}; {result.reason} after {result.time_s:.0f} virtual seconds")
