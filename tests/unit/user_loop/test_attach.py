"""`pl.attach`: what it refuses, and a process that torchrun has not started."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

import paceline as pl
from paceline.catalogue.parser import parse_plan
from paceline.integrations.alone import with_plain_shuffling
from paceline.user_loop.data.loop_data import UserLoop
from paceline.user_loop.start_line import start_line
from paceline.user_loop.step_policies import RankSteps
from paceline.user_loop.worker.loop_optimizer import check_own_steps

TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
LOCAL_STEPS = "k_sync(k=3) + local_steps(H=4, outer=nesterov)"
DATA = TensorDataset(torch.zeros(8, 2))


@pytest.fixture
def torchrun(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


def attach(protocol="bsp", **changes):
    model = changes.pop("model", None) or nn.Linear(2, 1)
    optimizer = changes.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    loader = changes.pop("loader", DataLoader(DATA, batch_size=2))
    return pl.attach(model, optimizer, loader, protocol=protocol, **changes)


def test_a_folder_that_cannot_be_used_is_refused_before_a_process_starts(torchrun, tmp_path):
    with pytest.raises(pl.UsageError, match="exists already; give another folder, or overwrite=True"):
        attach(out=tmp_path)
    (tmp_path / "mine").touch()
    with pytest.raises(pl.UsageError, match="contains other files than a run"):
        attach("all_reduce", out=tmp_path, overwrite=True)
    with pytest.raises(pl.UsageError, match="there is no folder"):
        attach(resume=tmp_path / "missing")


def test_a_folder_of_a_run_that_torchrun_has_restarted_is_resumed(torchrun, tmp_path, monkeypatch):
    (tmp_path / "run.json").touch()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    attach(out=tmp_path).finish()


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(8))

    def __len__(self):
        return 8


class OwnShuffling(RandomSampler):
    pass


class SeedableRandomSampler(RandomSampler):
    """Stand-in: that of Accelerate has seeds of its own."""


class OwnOrder(SequentialSampler):
    pass


class OwnBatches(BatchSampler):
    pass


class OwnOptimizer(torch.optim.SGD):
    pass


class FullyShardedDataParallel(nn.Module):
    """Stand-in: the real one needs a process group."""


def parallel():
    module = DistributedDataParallel.__new__(DistributedDataParallel)  # one process has no group for the real one
    nn.Module.__init__(module)
    return module


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": parallel(), "optimizer": OwnOptimizer([nn.Parameter(torch.ones(1))])}, "attach(ddp.module, ...)"),
        ({"model": nn.Sequential(nn.Linear(2, 2), FullyShardedDataParallel())}, "has a FullyShardedDataParallel (1)"),
        ({"model": nn.Sequential(nn.Linear(2, 1), nn.SyncBatchNorm(1))}, "the model has a SyncBatchNorm (1)"),
        ({"model": nn.Linear(2, 1).to(torch.float8_e5m2)}, "weight of the model is of torch.float8_e5m2, whose"),
        (
            {"loader": DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA, 2, 0))},
            "omit it, and give shuffle=True",
        ),
        ({"loader": DataLoader(DATA, batch_size=2, sampler=iter(range(8)))}, "a range_iterator, which has no length"),
        ({"loader": DataLoader(DATA, batch_sampler=iter([[0, 1]]))}, "deals a number of batches per epoch: give it a"),
        ({"optimizer": torch.optim.LBFGS(nn.Linear(2, 1).parameters())}, "LBFGS evaluates the loss within a step"),
        ({"optimizer": OwnOptimizer(nn.Linear(2, 1).parameters())}, "parameters that are not in the model"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 1).parameters())}, "parameters that are not in the model"),
        ({"progress": True}, "attach has no argument 'progress', expected callbacks, overwrite, resume"),
        ({"keep_checkpoints": "3"}, "Expected `int`, got `str` - at `$.keep_checkpoints`"),
        (
            {"protocol": "all_reduce", "optimizer": torch.optim.LBFGS(nn.Linear(2, 1).parameters())},
            "but each step has one gradient",
        ),
        (
            {"protocol": "s3gd", "optimizer": OwnOptimizer(nn.Linear(2, 1).parameters())},
            "which the ranks would not average",
        ),
        (
            {"protocol": LOCAL_STEPS, "optimizer": torch.optim.LBFGS(nn.Linear(2, 1).parameters())},
            "but each step has one gradient",
        ),
        (
            {"protocol": LOCAL_STEPS, "optimizer": torch.optim.SGD(nn.Linear(2, 1).parameters())},
            "parameters that are not in the model",
        ),
        ({"protocol": "all_reduce", "cluster_options": {"wire": "bf16"}}, "or sends compressed messages; omit wire"),
        ({"protocol": "all_reduce", "cluster_options": {"shards": 2}}, "cluster has shards=2"),
        ({"protocol": "all_reduce", "cluster_options": {"debug": True}}, "cluster has debug=True"),
        ({"accumulate": 0}, "accumulate"),
        ({"model": nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(1))}, "1.weight of the model has no shape yet"),
        (
            {"model": nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False))},
            "1.running_mean of the model has no shape yet",
        ),
        ({"model": nn.Linear(2, 1, device="meta")}, "call model.to_empty(device='cpu'), and initialize it, before"),
        ({"cluster": "torchrun(standby=1)", "protocol": "all_reduce"}, "standby=1, but all_reduce has no server"),
        ({"cluster": "torchrun(standby_sync=true)"}, "cluster has standby_sync=True, which attach does not"),
        ({"cluster": "torchrun(standby_address='h:1')"}, "standby_address='h:1' without a standby: give standby=1 too"),
        (
            {"protocol": "asp", "cluster": "torchrun(server=false)"},
            "asp with server=False: an update of a single stale",
        ),
        ({"cluster": "torchrun(heartbeats=9)"}, "torchrun has no knob 'heartbeats'"),
        ({"protocol": "all_reduce", "cluster": "torchrun(wire=bf16)"}, "or sends compressed messages; omit wire"),
    ],
)
@pytest.mark.usefixtures("torchrun")
def test_what_cannot_work_is_refused_with_what_to_type(changes, expected):
    if "cluster_options" in changes:
        changes = {**changes, "cluster": pl.Torchrun(**changes["cluster_options"])}
        del changes["cluster_options"]
    with pytest.raises(pl.UsageError) as refused:
        attach(**changes)
    assert expected in str(refused.value)


@pytest.mark.usefixtures("torchrun")
def test_several_shards_need_an_optimizer_of_torch():
    model = nn.Linear(2, 1)
    with pytest.raises(pl.UsageError, match=r"shards=2: .* but the loop has a OwnOptimizer: omit shards"):
        attach(model=model, optimizer=OwnOptimizer(model.parameters()), cluster="torchrun(shards=2)")


def test_devices_that_cannot_be_used_are_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, device="meta"))  # as a GPU, which a test does not need
    loop = UserLoop(
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        loader=DataLoader(DATA),
        accumulate=1,
        clip_norm=None,
    )
    with pytest.raises(pl.UsageError, match="the model is on cpu and meta, but the optimizer of each rank steps it on"):
        check_own_steps(loop)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("local:4", "cluster='local:4', but attach is for"),
        ("4*exp(mean=1)", 'give text as "torchrun(encrypt=false)"'),
        ("cluster.toml", "or omit it"),
        ("torchruns", "cluster='torchruns', but attach is for"),
        ("torchrun(encrypt=false", "cannot read 'torchrun(encrypt=false'"),
        ("torchrun(false)", "'false' has no name in torchrun(...)"),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_a_text_of_another_cluster_is_refused_also_alone(text, expected, alone, request):
    if not alone:
        request.getfixturevalue("torchrun")
    with pytest.raises(pl.UsageError) as refused:
        attach(cluster=text)
    assert expected in str(refused.value)


@pytest.mark.usefixtures("torchrun")
def test_the_shuffling_of_accelerate_is_accepted_as_that_of_torch():
    batches = BatchSampler(SeedableRandomSampler(DATA, num_samples=5), 2, drop_last=True)
    plain = with_plain_shuffling(DataLoader(DATA, batch_sampler=batches))
    assert (type(plain.sampler), len(plain.sampler), plain.batch_size, plain.drop_last) == (RandomSampler, 5, 2, True)
    attach(loader=plain).finish()


@pytest.mark.usefixtures("torchrun")
def test_a_second_run_of_a_process_is_refused_until_the_first_has_finished():
    with attach(), pytest.raises(pl.UsageError, match=r"call its finish\(\) before attach"):
        attach()
    attach(cluster="torchrun(encrypt=false)").finish()


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize("protocol", ["bsp", "all_reduce", LOCAL_STEPS])
def test_the_next_run_takes_the_optimizer_over_from_one_that_was_not_finished(protocol):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(protocol, model=model, optimizer=optimizer).over = True
    attach(protocol, model=model, optimizer=optimizer).finish()
    optimizer.step()


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize(
    ("protocol", "cluster", "has_server"),
    [
        *((protocol, None, False) for protocol in ("bsp", "balanced(m=2)", "k_sync(k=2)", "dbw")),
        *((protocol, None, True) for protocol in ("asp", "k_async(k=2)", "auto", "bsp@updates=2 >> asp", LOCAL_STEPS)),
        *(("bsp", f"torchrun({option})", True) for option in ("server=true", "wire=int8", "wire=bf16")),
        *(("bsp", f"torchrun({option})", False) for option in ("server=false", "encrypt=false", "debug=true")),
        ("k_async(k=2)", "torchrun(server=false)", False),
    ],
)
def test_fresh_gradients_need_no_server_and_the_start_line_says_which(protocol, cluster, has_server):
    with attach(protocol, cluster=cluster, lr_rule="noise" if protocol == "auto" else "constant") as run:
        chosen = run._part._own_cluster
        assert chosen.has_server == has_server
        line = start_line(run._part._plan, 2, None, has_server=chosen.has_server)
        assert ("sum of those that count" in line) != has_server
        assert ("goes to the server" in line or "sends the gradient to the server" in line) == has_server
        assert ("keeps a copy of the version" in line) == (protocol.startswith("k_async") and not has_server)


def test_the_start_line_says_that_sums_between_hosts_are_not_encrypted():
    said = "; sums between hosts are not encrypted"
    plans = [parse_plan(protocol) for protocol in ("bsp", "bsp", "all_reduce")]
    lines = [start_line(plan, 2, None, has_server=i == 0, on_one_host=False) for i, plan in enumerate(plans)]
    assert [line.endswith(said) for line in lines] == [False, True, True]
    assert said not in start_line(plans[1], 2, None, has_server=False)


@pytest.mark.usefixtures("torchrun")
def test_local_steps_are_made_by_any_optimizer():
    model = nn.Linear(2, 1)
    with attach(LOCAL_STEPS, model=model, optimizer=OwnOptimizer(model.parameters(), lr=0.1)) as run:
        assert isinstance(run._steps, RankSteps)


@pytest.mark.parametrize("cluster", [None, "torchrun", "torchrun(encrypt=false)", "torchrun(address=10.0.0.1)"])
def test_without_torchrun_the_loop_trains_alone_and_says_so(cluster, caplog):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    with attach(model=model, optimizer=optimizer, cluster=cluster) as run:
        steps = 0
        for _ in run.epochs(2):
            for (x,) in run.loader:
                model(x + 1).sum().backward()
                optimizer.step()
                steps += 1
    assert (steps, run.over) == (8, True)
    assert not torch.equal(before, model.weight)
    assert "no launcher has started this process, as paceline run does: the loop trains alone" in caplog.text
