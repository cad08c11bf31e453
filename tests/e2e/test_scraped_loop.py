"""Metrics of an attached loop under torchrun, scraped while it trains."""

import socket
from pathlib import Path

import pytest

from torchrun import torchrun

parser = pytest.importorskip("prometheus_client.parser")

SCRIPT = Path(__file__).parents[1] / "support/attached/scraped_script.py"
GRADIENT_BYTES = 4 * 501


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["bsp", "k_async(k=1)", "all_reduce"])
def test_the_process_of_the_server_serves_the_metrics_of_a_loop(protocol, tmp_path):
    done = torchrun(tmp_path, "--nproc-per-node", 2, SCRIPT, free_port(), protocol)
    assert done.returncode == 0, done.stderr
    page = "\n".join(line for line in done.stdout.splitlines() if line.startswith(("paceline", "# ")))
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in parser.text_string_to_metric_families(page)
        for sample in family.samples
    }
    used = found["paceline_gradients_total", "used"]
    assert found["paceline_updates_total",] >= 3
    assert used >= found["paceline_updates_total",]
    assert found["paceline_live_workers",] == 2
    if protocol == "k_async(k=1)":  # which needs a server
        assert found["paceline_bytes_total", "received"] >= used * GRADIENT_BYTES
        assert found["paceline_bytes_total", "sent"] >= used * GRADIENT_BYTES
    assert found["paceline_bytes_total", "received"] > 0
