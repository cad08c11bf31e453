"""Time of a lease: from a cluster file, and its range."""

import pytest

from paceline.clusters.parser import load_cluster
from paceline.clusters.simulated import Cluster
from paceline.clusters.timing.lease_time import LeaseTime
from paceline.errors import UsageError


def test_a_cluster_file_has_a_table_of_leases(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text("workers = 2\n[leases]\ncost_s = 0.02\nis_independent = true\n")
    assert load_cluster(path) == Cluster(2, leases=LeaseTime(cost_s=0.02, is_independent=True))


def test_a_negative_cost_is_refused():
    with pytest.raises(UsageError, match=r"cost_s=-1 is not a number in \[0, inf\)"):
        LeaseTime(cost_s=-1)
