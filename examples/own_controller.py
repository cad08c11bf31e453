"""Choose the quorum while training runs: more gradients an update as the loss falls."""

import paceline as pl


def more_when_it_gets_hard(observation: pl.Observation) -> int:
    """Two gradients at the beginning, one more every 100 updates, at most all workers."""
    return min(observation.live, 2 + observation.version // 100)


if __name__ == "__main__":
    cluster = pl.Cluster(8, timing=pl.ShiftedExponential(shift_s=0.3, mean_s=0.7))
    grow = pl.k_sync(k=2).controlled_by(pl.QuorumFunction(more_when_it_gets_hard))
    result = pl.train(pl.jobs.digits(), protocol=grow, cluster=cluster, stop=pl.Stop(loss=0.2))
    k = result.history.columns()["k"]
    print(f"k went from {k[0]} to {k[-1]}; {result.reason} after {result.time_s:.0f} virtual seconds")
