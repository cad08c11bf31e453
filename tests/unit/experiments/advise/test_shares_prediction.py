"""Predicted gain of shares by speed, from recordings of DDP."""

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline as pl
from ddp_recordings import describe, write_recording
from paceline.ddp_recording import layout
from paceline.ddp_recording.recording import DDPRecording
from paceline.experiments.advise.shares_prediction import predict_queue, predict_shares, run_command, simulated_steps
from paceline.policies.controllers.balance import Balance
from paceline.policies.shares import Pieces, ShareBalancer
from paceline.shares.balancer import Balancer
from paceline.shares.settings import BalanceSettings
from selections import parametrize_few

pytestmark = pytest.mark.usefixtures("short_predictions")
STEPS, RANKS, SUM_MS = 120, 4, 6.0


def recording(folder, work_ms, batch_size=16, hosts=None):
    write_recording(folder, work_ms, sum_ms=SUM_MS, hosts=hosts)
    for rank in range(RANKS):
        describe(folder, rank, 0, batch_size=batch_size)
    return DDPRecording(folder)


def slow(factor):
    work = np.full((RANKS, STEPS), 100.0)
    work[3] *= factor
    return work


@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_a_slow_rank_gets_fewer_samples(tmp_path, factor):
    found = predict_shares(recording(tmp_path, slow(factor), 32), Balance(pieces=16))
    ideal_ms = 100 * RANKS / (RANKS - 1 + 1 / factor)
    assert found.equal_s == pytest.approx((100 * factor + SUM_MS) / 1000)
    assert ideal_ms < 1000 * found.seconds_per_update - SUM_MS < 1.1 * ideal_ms  # whole pieces, at least one
    assert f"({found.gain:.2f} x), with the same parameters: paceline run --nproc-per-node 4" in found.sentence


@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_a_queue_has_the_time_of_list_scheduling(tmp_path, factor):
    found = predict_queue(recording(tmp_path, slow(factor), 32), "balanced(m=16)")
    ideal_ms = 100 * RANKS / (RANKS - 1 + 1 / factor)
    assert found.equal_s == pytest.approx((100 * factor + SUM_MS) / 1000)
    assert ideal_ms < 1000 * found.seconds_per_update - SUM_MS < ideal_ms + 100 / 16 * factor


def jumping():
    """Work of ranks of which another one is slow every three steps."""
    work = np.full((RANKS, STEPS), 100.0)
    for step in range(STEPS):
        work[step // 3 % RANKS, step] *= 3
    return work


def test_a_queue_follows_a_rank_that_is_slow_for_a_while_at_once(tmp_path):
    read = recording(tmp_path, jumping())
    queue, shares = predict_queue(read), predict_shares(read, Balance())
    assert queue.gain > 1.5 * shares.gain
    loop = 'in a loop of your own: pl.attach(model, optimizer, loader, protocol="balanced(m=8)")'
    assert queue.compared_with(shares).endswith(loop)
    assert shares.compared_with(queue).endswith("no less than one share each.")


class Recorded:
    """Times of a recording, all of whose ranks spend the same time outside of forward and backward."""

    ranks, steps = RANKS, STEPS

    def __init__(self, passes_ms, outside_ms):
        self.work_s = (passes_ms + outside_ms) / 1000
        self.step_s = np.broadcast_to(self.work_s.max(axis=0), self.work_s.shape)
        self._outside_s = outside_ms / 1000

    def part_s(self, part):
        assert part == "data"
        return np.full((RANKS, STEPS), self._outside_s)


def test_a_lease_costs_what_ranks_spend_outside_of_the_passes():
    more_s = []
    for work_ms in (slow(2.0), jumping()):
        without_s, with_s = (predict_queue(Recorded(work_ms, each)).seconds_per_update for each in (0.0, 20.0))
        more_s.append(with_s - without_s)
    assert more_s[0] == pytest.approx(0.02)  # one lease of each rank
    assert 0.025 < more_s[1] < 0.1


def test_equal_ranks_gain_nothing(tmp_path):
    noise = np.random.default_rng(0).lognormal(0, 0.05, (RANKS, STEPS))
    found = predict_shares(recording(tmp_path, 100 * noise), Balance())
    assert found.gain == pytest.approx(1, abs=0.01)
    assert "would gain nothing" in found.sentence
    assert "paceline run" not in found.sentence


def test_a_rank_that_is_slow_for_a_while_is_followed_late(tmp_path):
    work = np.full((RANKS, STEPS), 100.0)
    for step in range(STEPS):
        work[step // 15 % RANKS, step] *= 3
    gain = predict_shares(recording(tmp_path, work), Balance()).gain
    ideal = (300 + SUM_MS) / (100 * RANKS / (RANKS - 1 + 1 / 3) + SUM_MS)
    assert 1.3 < gain < 0.85 * ideal


def test_what_every_rank_spends_outside_of_the_passes_stays(tmp_path):
    """As the step of the optimizer, which takes as long for fewer samples."""
    write_recording(tmp_path, slow(2.0) + 50, sum_ms=SUM_MS, part="data")  # 1 ms each in forward and backward
    for rank in range(RANKS):
        describe(tmp_path, rank, 0, batch_size=16)
    found = predict_shares(DDPRecording(tmp_path), Balance(pieces=16))
    fixed_ms, own_ms = 100 + 50 - 2, np.array([2, 2, 2, 102])
    shared_s, _ = simulated_steps(np.tile(own_ms[:, None] / 1000, STEPS), ShareBalancer(4, Pieces(16, 16)), 16)
    assert 1000 * found.seconds_per_update == pytest.approx(fixed_ms + 1000 * shared_s[-1] + SUM_MS, rel=1e-6)


def test_one_change_that_is_not_worth_it_is_not_made():
    """Hysteresis: a formula without it would move samples at once."""
    policy = ShareBalancer(2, Pieces(16))
    work_s = np.array([[1.0, 1.2, 0.9, 1.1] * 10, [1.02, 1.1, 1.0, 1.0] * 10])
    shared_s, equal_s = simulated_steps(work_s, policy, 16)
    assert shared_s.tolist() == equal_s.tolist()
    assert policy.shares == (16, 16)


def test_a_decision_is_by_the_times_of_the_step_before_the_latest():
    work_s = np.array([[1.0] * 6, [3.0] * 6])
    shared_s, _ = simulated_steps(work_s, ShareBalancer(2, Pieces(16)), 16)
    assert shared_s.tolist()[:4] == [3.0] * 4  # one that does not count, and two times, each known a step later
    assert shared_s[4] == pytest.approx(1.5)


class Ranks:
    """Balancers of all ranks in this process, whose clocks are scripted; they exchange rows through a list."""

    def __init__(self, monkeypatch, batch_size, pieces):
        self.rows, self.batch_size = [None] * RANKS, batch_size
        monkeypatch.setattr(dist, "get_world_size", lambda *_: RANKS)
        monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
        self.balancers = []
        for rank in range(RANKS):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            monkeypatch.setattr("paceline.shares.balancer.RankTimes", lambda _, rank=rank: Exchange(self, rank))
            self.balancers.append(Balancer(BalanceSettings(pieces=pieces), nn.Linear(1, 1), torch.device("cpu")))

    def update(self, work_s):
        """Make an update, and return the seconds of each rank."""
        seconds = []
        for balancer, whole_s in zip(self.balancers, work_s, strict=True):
            samples = balancer.share(self.batch_size)
            seconds.append(whole_s * samples / self.batch_size)
            balancer.stopwatch = ScriptedWatch(seconds[-1])
            balancer.forward_began([(samples, 1)])
            balancer.weight_of(nn.Linear(1, 1)(torch.ones(samples, 1)).pow(2).mean())
        sent = [*self.rows]
        for balancer in self.balancers:
            balancer._times.arrived = sent
            balancer.sums_ended()
        return seconds


class Exchange:
    """Exchange of rows between balancers that take their turns."""

    def __init__(self, ranks, rank):
        self.ranks, self.rank, self.is_pending = ranks, rank, False

    def begin(self, row):
        self.ranks.rows[self.rank], self.is_pending = row, True

    def end(self):
        was_pending, self.is_pending = self.is_pending, False
        return self.arrived if was_pending else None

    def gather(self, row):
        return [row] * RANKS


class ScriptedWatch:
    """Stopwatch that has measured a given time."""

    def __init__(self, seconds):
        self.taken = seconds

    def start(self):
        pass

    def take(self):
        return self.taken

    def seconds(self, spans):
        return spans


def moving(fast_s):
    work_s = np.full((RANKS, STEPS), fast_s)
    for step in range(STEPS):
        work_s[step // 15 % RANKS, step] *= 3
    return work_s


@parametrize_few(("fast_s", "sigma"), [(0.1, 0.0), (0.1, 0.05), (0.1, 0.3), (0.004, 0.05)], keep=1)
def test_the_prediction_is_what_the_balancers_of_the_ranks_do(monkeypatch, fast_s, sigma):
    work_s = moving(fast_s) * np.random.default_rng(1).lognormal(0, sigma, (RANKS, STEPS))
    ranks = Ranks(monkeypatch, 16, pieces=16)
    real_s = [max(ranks.update(each)) for each in work_s.T]
    predicted_s, _ = simulated_steps(work_s, ShareBalancer(RANKS, Pieces(16, 16)), 16)
    assert len({*real_s}) > 2
    assert predicted_s.tolist() == real_s


@pytest.mark.parametrize(
    ("command", "hosts", "shown"),
    [
        (["torchrun", "--standalone", "--nproc-per-node", "4", "train.py", "--lr", "0.1"], None, "train.py --lr 0.1"),
        (["python", "-m", "torch.distributed.run", "--nproc-per-node=4", "-m", "pkg.train"], None, "-m pkg.train"),
        (["python", "-m", "torch.distributed.run", "a b.py"], None, "'a b.py'"),
        (["srun", "start.sh"], None, "train.py"),
        (["torchrun", "x\x1b[31m.py"], None, "'x"),
        (7, None, "train.py"),
    ],
)
def test_the_command_is_that_of_the_recorded_script(tmp_path, command, hosts, shown):
    read = recording(tmp_path, slow(2.0))
    layout.host_file(tmp_path, "alpha").write_text(json.dumps({"schema": 1, "command": command}))
    assert run_command(read).startswith(f"paceline run --nproc-per-node 4 {shown}"[:40])
    assert "\x1b" not in run_command(read)


def test_the_command_on_several_hosts_names_where_they_meet(tmp_path):
    read = recording(tmp_path, slow(2.0), hosts=list("aabb"))
    assert run_command(read) == (
        "paceline run --nnodes 2 --node-rank RANK --rdzv-endpoint HOST:29400 --nproc-per-node 2 train.py"
    )


def test_advice_ranks_shares_among_the_protocols(tmp_path):
    recording(tmp_path, slow(2.0))
    advice = pl.advise_recording(tmp_path, protocols=["bsp", "balanced(m=16, leases=1)", "balanced(m=8)"])
    by_name = {each.protocol: each.seconds_per_update for each in advice.ranking}
    assert by_name["balanced(m=8)"] == advice.queue.seconds_per_update < by_name["bsp"]
    assert advice.as_json()["queue"]["gain"] == advice.queue.gain
    assert advice.queue.compared_with(advice.balanced) in str(advice).replace("\n", " ")
    assert by_name["balanced(m=16, leases=1)"] == advice.balanced.seconds_per_update < by_name["bsp"]
    assert advice.as_json()["balanced"]["gain"] == advice.balanced.gain
    assert advice.balanced.sentence in str(advice).replace("\n", " ")
    neither = pl.advise_recording(tmp_path, protocols=["bsp"])
    assert neither.balanced is neither.queue is None
