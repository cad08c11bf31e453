"""All packets of a run between two hosts, searched for parameters, losses and the name of the job."""

import struct
import sys

import pytest

import packet_capture
from benchmarks.namespaces import hosts
from hosts import need_hosts, ranks_on_hosts
from paceline.core.records import GradientArrived
from paceline.worker.torch_utils import build_model
from tiny_jobs import tiny_job

pytestmark = [pytest.mark.slow, pytest.mark.processes]
NAME = "a job that nobody may read of"


def secrets_of(end):
    """Return the bytes to search for: 4 numbers of each parameter, losses as they are sent, and names."""
    initial = [each.detach().numpy().tobytes() for each in build_model(tiny_job(), 1).parameters()]
    final = [each.numpy().tobytes() for each in end.parameters.values()]
    return {
        "initial parameters": [each[:32] for each in initial],
        "final parameters": [each[:32] for each in final],
        "losses": [struct.pack("!d", record.loss) for record in end.of(GradientArrived) if record.loss is not None],
        "names": [NAME.encode(), b"batch_size", b"RemoteTaskDone", b"cross_entropy"],
    }


@pytest.mark.parametrize("encrypt", [True, False], ids=["TLS", "plain"])
def test_a_capture_of_all_packets_shows_nothing_of_the_job(encrypt, tmp_path):
    need_hosts()
    capture = tmp_path / "packets"
    with hosts(2) as made:
        sniffer = made.run(made.names[0], [sys.executable, packet_capture.__file__, "eth0", str(capture)])
        try:
            assert sniffer.stdout.readline() == "capturing\n"
            settings = {"protocol": "asp", "stop": "updates=30", "seed": 1}
            job = tiny_job(name=NAME)
            with ranks_on_hosts(made, [0, 1, 1], job, {"encrypt": encrypt}, **settings) as started:
                started.start_all()
                end, *others = [started.end(rank) for rank in range(3)]
        finally:
            sniffer.kill()
            sniffer.communicate()
    assert [each.stopped_by for each in (end, *others)] == ["updates"] * 3
    packets, secrets = capture.read_bytes(), secrets_of(end)
    assert all(secrets.values())
    assert len(packets) > 10_000
    found = [kind for kind, values in secrets.items() if any(value in packets for value in values)]
    assert found == ([] if encrypt else list(secrets))
