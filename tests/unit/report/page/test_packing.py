import zlib
from base64 import b64decode

import numpy as np
import pytest

from paceline.report.page.packing import RESOLUTION, packed, packed_updates, packed_work, quantum_s
from paceline.report.run_data import read_run
from selections import parametrize_few
from written_runs import train_run


def unpacked(packed_columns):
    planes = np.frombuffer(zlib.decompress(b64decode(packed_columns["deflated"])), np.uint8)
    columns, offset = {}, 0
    for name, length in packed_columns["columns"]:
        of_column = planes[offset : offset + 4 * length].reshape(4, length)
        columns[name] = sum(plane.astype(np.int64) << (8 * i) for i, plane in enumerate(of_column))
        offset += 4 * length
    assert offset == len(planes)
    return {name: ((column + 2**31) % 2**32) - 2**31 for name, column in columns.items()}


def test_integers_survive_packing():
    rng = np.random.default_rng(0)
    columns = {"any": rng.integers(-(2**31), 2**31, size=1000), "none": np.zeros(0, int), "few": np.array([-1, 0, 7])}
    for name, column in unpacked(packed(columns)).items():
        assert column.tolist() == columns[name].tolist()


@parametrize_few("protocol", ["asp", "k_batch_sync(k=3)", "bsp"], keep=1)
def test_the_page_has_every_task_and_every_update(tmp_path, protocol):
    run = read_run(train_run(tmp_path / "run", protocol), "")
    work = packed_work(run)
    columns = unpacked(work)
    begin = 0
    for worker, pieces in enumerate(work["per_worker"]):
        rows = slice(begin, begin + pieces)
        assert (run.work["worker"][rows] == worker).all()
        ends = np.cumsum(columns["idle"][rows] + columns["busy"][rows]) * quantum_s(run)
        assert ends == pytest.approx(run.work["end_s"][rows], abs=run.end_s / RESOLUTION)
        starts = ends - columns["busy"][rows] * quantum_s(run)
        assert starts == pytest.approx(run.work["start_s"][rows], abs=run.end_s / RESOLUTION)
        begin += pieces
    assert begin == len(run.work["worker"])
    assert np.cumsum(columns["draw"]).tolist() == run.work["draw"].tolist()
    assert np.cumsum(columns["version"]).tolist() == run.work["version"].tolist()
    updates = unpacked(packed_updates(run))
    assert updates["k"].tolist() == run.updates["k"].tolist()
    assert np.cumsum(updates["workload"]).tolist() == run.updates["workload"].tolist()


def test_a_constant_step_is_packed_in_a_few_bytes():
    assert len(packed({"draw": np.ones(100_000, int)})["deflated"]) < 1_000
