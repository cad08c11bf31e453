"""Debug mode: a script that changes the parameters itself is found out, with the place and the moment."""

import os
import threading
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

import paceline as pl
import rank_threads
from paceline.clusters.parser import parse_cluster
from paceline.worker.parameter_guard import ParameterGuard, check_version, checksum
from paceline.worker.replica import Replica
from paceline.worker.torch_utils import build_model
from ranks import ranks, run
from selections import parametrize_few
from tiny_jobs import batch_norm_net, dataset, small_net, tiny_job

DEBUG = {"debug": True}
MADE = []  # models of this process


def remembered_net(dtype=torch.float64):
    MADE.append(small_net(dtype))
    return MADE[-1]


def halve(model):
    with torch.no_grad():
        model[2].weight.mul_(0.5)


def replace(model):
    model[2].weight.data = model[2].weight.data.clone()


class Meddling(pl.callbacks.Callback):
    """Changes the server's model at a version."""

    def __init__(self, change):
        self.change = change

    def on_update(self, update):
        if update.version == 3:
            self.change(next(model for model in MADE if model[0].weight.grad is not None))  # only the server's has any


class ClampingStep:
    """A step that changes the parameters, on one rank only."""

    def __init__(self, rank=None):
        self.rank = rank

    def __call__(self, model, batch):
        thread = threading.current_thread().name
        rank = thread.removeprefix("rank ") if thread.startswith("rank ") else os.environ.get("RANK")
        if self.rank in (None, rank):
            with torch.no_grad():
                model[0].bias.clamp_(max=0.01)
        return F.cross_entropy(model(batch[0]), batch[1])


class MeddlingData(torch.utils.data.Dataset):
    """Data that change the parameters where they lie, with the batch of the second draw, after two looks and one."""

    def __init__(self, dtype):
        self.samples = dataset(dtype=dtype)
        self.batches = 0

    def __len__(self):
        return len(self.samples)

    def minibatch(self, indices):
        self.batches += 1
        if self.batches == 4:
            halve(MADE[-1])
        return [tensor[indices] for tensor in self.samples.tensors]


@pytest.mark.parametrize("change", [halve, replace])
def test_a_parameter_guard_detects_a_change(change):
    model = small_net()
    guard = ParameterGuard.for_parameters(model)
    guard.snapshot()
    guard.check("the server", "ever")
    change(model)
    with pytest.raises(
        pl.UsageError, match=r"^2.weight changed on the server ever; only the job's optimizer may change"
    ):
        guard.check("the server", "ever")
    guard.snapshot()
    guard.check("the server", "ever")


def test_a_full_guard_includes_buffers_and_frozen_parameters():
    model = batch_norm_net()
    model[0].weight.requires_grad_(False)
    guard = ParameterGuard.for_model(model)
    guard.snapshot()
    model(torch.randn(8, 5).double())
    model[0].weight.data[0, 0] += 1
    names = r"0.weight, 1.running_mean, 1.running_var and 1 more changed"
    with pytest.raises(pl.UsageError, match=names):
        guard.check("the server", "")


def test_another_version_is_refused():
    memory = torch.arange(100, dtype=torch.uint8)
    check_version(memory, checksum(memory), "worker 1", "before its draw 2")
    check_version(memory, None, "worker 1", "before its draw 2")
    with pytest.raises(pl.UsageError, match=r"the parameters on worker 1 differ from the server's before its draw 2;"):
        check_version(memory, checksum(memory) ^ 1, "worker 1", "before its draw 2")


def test_a_job_that_changes_its_parameters_is_detected_only_in_debug_mode():
    job = tiny_job(loss=None, step=ClampingStep())
    replica, watched = Replica(job, 1, 2), Replica(job, 1, 2, debug=True)
    version, gradient = replica.layout.allocate(), replica.layout.allocate()
    version.flat_parameters[0].fill_(0.5)
    with patch("paceline.worker.parameter_guard.checksum", side_effect=AssertionError):
        assert replica.gradient(1, 4, None, version, gradient).finite
    with pytest.raises(pl.UsageError, match=r"0.bias changed on worker 1 while job tiny computed draw 5;"):
        watched.gradient(1, 5, None, _halves(version), gradient)


class Renormalized(torch.nn.Module):
    """Model whose forward pass writes to a parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(4, 3, max_norm=0.1)
        self.last = torch.nn.Linear(5, 3)

    def forward(self, x):
        return self.last(x) + self.embedding(x[:, 0].long().abs() % 4)


@pytest.mark.parametrize("cluster", [pl.Cluster(2), pl.LocalCluster(2)], ids=["simulated", "local"])
def test_a_forward_pass_that_would_write_to_the_server_is_an_error(cluster):
    job = tiny_job(model=Renormalized, data=dataset(dtype=torch.float32))
    with pytest.raises(pl.UsageError, match=r"embedding.weight changed on worker [01] while job tiny computed draw 1;"):
        pl.train(job, protocol="asp", cluster=cluster, stop="updates=9")


class Initialized(torch.nn.Module):
    """Model whose first batch sets a bias through its data."""

    def __init__(self):
        super().__init__()
        self.last, self.is_done = torch.nn.Linear(5, 3), False

    def forward(self, x):
        if not self.is_done:
            self.last.bias.data.copy_(-self.last(x).detach().mean(0))
            self.is_done = True
        return self.last(x)


@pytest.mark.parametrize("model", [Renormalized, Initialized])
def test_a_forward_pass_whose_writes_the_next_version_overwrites_is_an_error_on_ranks(model):
    job = tiny_job(model=model, data=dataset(dtype=torch.float32))
    with rank_threads.ranks(2, job, protocol="asp", stop="updates=9") as processes:
        processes.start_workers()
        with pytest.raises(pl.UsageError, match=r"(embedding.weight|last.bias) changed on worker [01] while job tiny"):
            processes.serve()


def test_a_write_through_data_is_an_error():
    job = tiny_job(model=Initialized, data=dataset(dtype=torch.float32))
    with pytest.raises(pl.UsageError, match=r"last.bias changed on worker [01] while job tiny computed draw 1;"):
        pl.train(job, protocol="asp", cluster=pl.Cluster(2), stop="updates=9")


class Unfrozen(torch.nn.Module):
    """Model that unfreezes a layer in its forward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(5, 5), torch.nn.Linear(5, 3)
        self.first.requires_grad_(False)

    def forward(self, x):
        self.first.requires_grad_(True)
        return self.last(self.first(x))


def test_a_parameter_that_is_unfrozen_in_the_run_is_an_error():
    job = tiny_job(model=Unfrozen, data=dataset(dtype=torch.float32))
    with pytest.raises(pl.UsageError, match=r"first.weight, first.bias began to require a gradient"):
        pl.train(job, protocol="asp", cluster=pl.Cluster(2), stop="updates=9")


class Taught(torch.nn.Module):
    """Model with a frozen teacher, which follows it in the forward pass."""

    def __init__(self):
        super().__init__()
        self.last, self.teacher = (torch.nn.Linear(5, 3) for _ in range(2))
        self.teacher.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.teacher.weight.lerp_(self.last.weight, 0.1)
        return self.last(x) - 0.1 * self.teacher(x)


@pytest.mark.parametrize("protocol", ["bsp", "asp + local_steps(H=2)", "all_reduce"])
@pytest.mark.parametrize("cluster", [pl.Cluster(2), pl.LocalCluster(2)])
def test_a_frozen_teacher_that_the_trained_model_would_lack_is_refused(protocol, cluster):
    if protocol == "all_reduce" and isinstance(cluster, pl.LocalCluster):
        pytest.skip("local workers have a server")
    job = tiny_job(model=Taught, data=dataset(dtype=torch.float32))
    with pytest.raises(pl.UsageError, match=r"teacher.weight changed on worker [01] .* frozen .*: make it a buffer"):
        pl.train(job, protocol=protocol, cluster=cluster, stop="updates=3")


class TaughtByBuffers(Taught):
    """Model whose teacher has buffers in place of parameters."""

    def __init__(self):
        super().__init__()
        for name, parameter in list(self.teacher.named_parameters()):
            delattr(self.teacher, name)
            self.teacher.register_buffer(name, parameter.detach())


@pytest.mark.parametrize("protocol", ["bsp", "all_reduce"])
def test_a_teacher_of_buffers_moves_once_an_update(protocol):
    data = dataset(8, dtype=torch.float32)
    job = tiny_job(model=TaughtByBuffers, data=data, batch_size=8, sampling="epoch")  # each minibatch is the same
    trained = pl.train(job, protocol=protocol, cluster=pl.Cluster(2), stop="updates=5", seed=3).model
    plain = build_model(job, 3)
    optimizer = job.optimizer(plain.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        job.loss(plain(data[:][0]), data[:][1]).backward()
        optimizer.step()
    assert torch.allclose(trained.teacher.weight, plain.teacher.weight, atol=1e-6)
    assert torch.allclose(trained.last.weight, plain.last.weight, atol=1e-6)


def test_local_steps_may_write_to_their_own_parameters():
    job = tiny_job(model=Renormalized, data=dataset(dtype=torch.float32))
    run = pl.train(job, protocol="asp + local_steps(H=2)", cluster=pl.Cluster(2), stop="updates=3")
    assert run.stopped_by is pl.results.Outcome.UPDATES


def _halves(version):
    version.flat_parameters[0].fill_(0.5)
    return version


@pytest.mark.parametrize("change", [halve, pytest.param(replace, marks=pytest.mark.slow)])
def test_a_callback_that_changes_the_model_of_the_server_is_detected(change):
    job = tiny_job(model=remembered_net)
    since = r"2.weight changed on the server after version 3 was made, at [\d.]+ s;"
    local = pl.LocalCluster(2, debug=True)
    with pytest.raises(pl.UsageError, match=since):
        pl.train(job, protocol="bsp", cluster=local, stop="updates=9", callbacks=[Meddling(change)])
    MADE.clear()


@pytest.mark.processes
def test_only_ranks_that_change_parameters_are_reported():
    [end, *_] = run(2, tiny_job(model=batch_norm_net), DEBUG, protocol="bsp", stop="updates=9")
    assert end.stopped_by == "updates"
    job = tiny_job(loss=None, step=ClampingStep("1"))
    with ranks(2, job, DEBUG, protocol="bsp", stop="updates=9") as started:
        started.start_workers()
        with pytest.raises(pl.UsageError, match=r"0.bias changed on worker 0 while job tiny computed draw 1;"):
            started.serve()
        with pytest.raises(pl.UsageError, match=r"0.bias changed on worker 0"):
            started.end(1)


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["float32", "bf16"])
def test_a_version_changed_on_a_worker_is_detected(wire):
    job = tiny_job(model=partial(remembered_net, torch.float32), data=MeddlingData(torch.float32))
    said = r"the parameters on worker \d differ from the server's after its draw 2, of version 1;"
    with ranks(3, job, {**DEBUG, "wire": wire}, protocol="bsp", stop="updates=9") as started:
        started.start_all()
        for rank in range(3):
            with pytest.raises(pl.UsageError, match=said):
                started.end(rank)


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["1", "2"], ids=["leader", "follower"])
def test_a_node_process_that_changes_its_parameters_is_detected(rank):
    node = {**DEBUG, "workers": "node"}
    assert run(3, tiny_job(), node, protocol="bsp", stop="updates=9")[0].stopped_by == "updates"
    with ranks(3, tiny_job(loss=None, step=ClampingStep(rank)), node, protocol="bsp", stop="updates=9") as started:
        started.start_all()
        with pytest.raises(pl.UsageError, match=r"0.bias changed on worker 0 while job tiny computed draw 1;"):
            started.end(0)


class MeddlingLoader(MeddlingData):
    """Data that change the parameters of their rank where they lie, on one rank only."""

    def minibatch(self, indices):
        if os.environ.get("RANK") != "1":
            return [tensor[indices] for tensor in self.samples.tensors]
        return super().minibatch(indices)


@parametrize_few("protocol", ["all_reduce", "local_sgd(H=3)", "dc_s3gd", "dc_s3gd(lag=2)"], keep=1)
def test_without_a_server_the_rank_that_changes_its_parameters_is_named(protocol):
    job = tiny_job(loss=None, step=ClampingStep("1"))
    with rank_threads.ranks(2, job, DEBUG, protocol=protocol, stop="updates=9") as started:
        started.start_workers()
        with pytest.raises(pl.UsageError, match=r"0.bias changed on worker 1 while job tiny computed draw 1;"):
            started.serve()
        with pytest.raises(pl.UsageError, match=r"0.bias changed on worker 1"):
            started.end(1)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["all_reduce", "local_sgd(H=3)", "s3gd", "dc_s3gd"])
def test_without_a_server_valid_ranks_raise_no_error(protocol):
    job = tiny_job(model=batch_norm_net, eval_data=dataset())
    [end, *_] = run(2, job, DEBUG, protocol=protocol, stop="updates=9", evaluate_every="updates=2")
    assert end.stopped_by == "updates"


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["all_reduce", "local_sgd(H=3)", "dc_s3gd", "dc_s3gd(lag=2)"])
def test_without_a_server_data_that_change_the_parameters_are_detected(protocol):
    job = tiny_job(model=remembered_net, data=MeddlingLoader(torch.float64))
    with ranks(2, job, DEBUG, protocol=protocol, stop="updates=9", evaluate_every=None) as started:
        started.start_all()
        for rank in range(2):
            with pytest.raises(pl.UsageError, match=r"2.weight.* changed on worker 1 after it .*; only the job"):
                started.end(rank)


def test_without_a_server_the_port_is_released_while_the_error_is_referenced():
    kept = []
    with ranks(1, tiny_job(loss=None, step=ClampingStep()), DEBUG, protocol="all_reduce", stop="updates=9") as started:
        for _ in range(2):
            with pytest.raises(pl.UsageError, match=r"0.bias changed on worker 0 while job tiny computed") as error:
                started.serve()
            kept.append(error)


class HalvingTheAverage(pl.callbacks.Callback):
    """Changes the model of the session, which was made first, at a version."""

    def on_update(self, update):
        if update.version == 3:
            halve(MADE[0])


@pytest.mark.parametrize("protocol", ["all_reduce", pytest.param("dc_s3gd", marks=pytest.mark.slow)])
def test_without_a_server_a_callback_that_changes_the_model_is_detected(protocol):
    job = tiny_job(model=remembered_net)
    MADE.clear()
    said = r"2.weight changed on worker 0 after it applied version 3;"
    with (
        ranks(1, job, DEBUG, protocol=protocol, stop="updates=9", callbacks=[HalvingTheAverage()]) as started,
        pytest.raises(pl.UsageError, match=said),
    ):
        started.serve()
    MADE.clear()


def test_debug_mode_can_be_given_as_text_and_is_not_part_of_the_run(tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PACELINE_TOKEN", "secret")
    assert parse_cluster("torchrun(debug=true)").debug
    assert str(parse_cluster("torchrun(debug=true)")) == str(pl.Torchrun())
    file = tmp_path / "cluster.toml"
    file.write_text("[local]\nworkers = 2\ndebug = true")
    assert parse_cluster(str(file)) == pl.LocalCluster(2, debug=True)
    for make in (pl.Torchrun, lambda **debug: pl.LocalCluster(2, **debug)):
        with pytest.raises(pl.UsageError, match="debug=1, expected true or false"):
            make(debug=1)
