"""Each wrong input gives one clear line and a status, never a traceback, a hang, or something else quietly."""

import gzip
import struct
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.cli import main
from selections import parametrize_few
from tiny_jobs import dataset, tiny_job

TRAIN = {"--protocol": "bsp", "--cluster": "4*exp(mean=1)", "--stop": "updates=3"}


@pytest.fixture
def paceline(monkeypatch, capsys, tmp_path):
    """Run the program in an empty folder; return its status and what it says on standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, capsys.readouterr().err

    return run


def train(paceline, job="digits", **options):
    given = {**TRAIN, **{f"--{name.replace('_', '-')}": value for name, value in options.items()}}
    return paceline("train", job, *[word for option in given.items() for word in option])


TRAIN_DIGITS = ("train", "digits", "--protocol", "bsp", "--stop", "updates=3")
USAGE = [
    ({"protocol": "k_sink(k=2)"}, "'k_sink' is not known; did you mean 'k_sync'?"),
    ({"protocol": "k-sync(k=2)"}, "cannot read 'k-sync(k=2)'; did you mean 'k_sync(k=2)'?"),
    ({"protocol": "ssp(leed=2)"}, "ssp has no knob 'leed'; did you mean 'lead'?"),
    ({"protocol": "k_sync"}, "k"),
    ({"protocol": "k_sync(k=0)"}, "quorum k = 0, expected a whole number >= 1"),
    ({"protocol": "k_sync(k=2.5)"}, "k_sync: k=2.5, expected a whole number"),
    ({"protocol": "k_async(k=5)"}, "give k <= 4, or a protocol that refills on arrival"),
    ({"protocol": "bsp@50% >> asp"}, "add gradients= or epochs= to the stop"),
    ({"protocol": "bsp@50% >> k_sync(k=2)@25% >> asp", "stop": "epochs=1"}, "the parts overlap"),
    ({"protocol": "bsp@updates=5 >> asp@updates=9"}, "the last part of a plan runs to the end"),
    ({"protocol": "bsp >> asp"}, "bsp has no end, so asp is never reached"),
    ({"protocol": "bsp@120% >> asp"}, "0% < x < 100%"),
    ({"protocol": "bsp@sometime >> asp"}, "expected 25%, updates=100"),
    ({"protocol": "ssp(lead=-1)"}, "ssp(lead=-1): lead = -1, expected a whole number >= 0"),
    ({"protocol": "ringmaster(r=0)"}, "r = 0, expected a whole number >= 1"),
    ({"cluster": "local:0"}, "is not a number of workers"),
    ({"cluster": "4*normal(mean=1)"}, "'normal' is not known"),
    ({"cluster": "missing.toml"}, "cannot read the cluster file missing.toml"),
    ({"stop": "los=0.2"}, "stop condition 'los' is not known; did you mean 'loss'?"),
    ({"stop": "loss=low"}, "expected a number, as in loss=10"),
    ({"stop": "accuracy=97"}, "expected a share, as 0.97"),
    ({"stop": "updates=-1"}, "expected a number > 0"),
    ({"job": "digit"}, "no job is called 'digit'; did you mean 'digits'?"),
    ({"job": "nowhere:job"}, "no module 'nowhere'"),
    ({"job": "mnist"}, "run 'paceline data fetch mnist"),
    ({"evaluate_every": "sometimes"}, "expected 25%, updates=100"),
    ({"worker_timeout_s": "-1"}, "--worker-timeout-s -1.0, expected seconds > 0"),
]


def test_a_wrong_job_is_named_before_a_missing_option(paceline):
    assert "no job is called 'digit'; did you mean 'digits'?" in paceline("train", "digit")[1]


@pytest.mark.parametrize(("options", "words"), USAGE, ids=[words for _, words in USAGE])
def test_usage_errors_are_one_line_and_status_2(paceline, options, words):
    status, said = train(paceline, **options)
    assert status == 2
    assert words in said
    assert said.startswith("paceline: ")
    assert said.count("\n") == 1


def test_an_unknown_option_is_one_line(paceline):
    status, said = paceline("train", "digits", "--protocl", "bsp")
    assert status == 2
    assert "--protocl" in said


COMPARE = ("compare", "digits", "--protocols", "bsp", "--cluster", "2*exp(mean=1)", "--stop", "updates=2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "digits", "--seed", "-1"), "'--seed': Input should be greater than or equal to 0; see "),
        (("train", "digits", "--seed", "x"), "'--seed': Input should be a valid integer"),
        ((*COMPARE, "--price", "nan"), "'--price': Input should be greater than or equal to 0"),
        ((*COMPARE, "--format", "yaml"), "'--format': 'yaml' is not one of 'text', 'json'; see "),
        (("compare", "digits"), "Missing option '--protocols'; see "),
        ((*COMPARE, "--out", __file__), "is a file; give another folder with --out, or remove the file"),
        (
            ("theory", "--protocols", "bsp", "--cluster", "2*exp(mean=1)", "--k", "1,x"),
            "--k '1,x', expected whole numbers",
        ),
        (
            ("train", "!!", *TRAIN_DIGITS[2:]),
            "cannot read '!!': type a name, or a name with its knobs, as in mnist(model=",
        ),
        (("replay",), "Missing argument 'run'; see "),
        (("train", "--sed", "3"), "No such option: --sed (Possible options: "),
        (("serch", "digits"), "No such command 'serch'. Did you mean 'search', 'search-cost'; see "),
        (("report", ""), "an argument is empty; is a variable of the shell not set?"),
        ((*TRAIN_DIGITS, "--cluster", "trace:none.csv"), "cannot read the trace 'none.csv': No such file or directory"),
        ((*TRAIN_DIGITS, "--cluster", "2*exp(mean=nan)"), "exp: mean=nan is not a number in (0, inf)"),
    ],
    ids=lambda value: " ".join(value)[-30:] if isinstance(value, tuple) else "",
)
def test_a_wrong_command_line_is_one_line_with_option_and_remedy(arguments, message, paceline):
    status, stderr = paceline(*arguments)
    assert status == 2
    assert message in " ".join(stderr.split())
    assert "Traceback" not in stderr


def test_without_arguments_only_the_first_screen_is_printed(paceline):
    assert paceline() == (0, "")


def test_a_trace_is_refused_with_its_line_and_column(paceline, tmp_path):
    columns = "worker,draw,start_s,pull_s,compute_s,push_s,end_s,censored"
    (tmp_path / "trace.csv").write_text(f"{columns}\n0,1,0,0,1,0,1,0\n0,2,1,0,-3,0,2,0\n")
    status, said = train(paceline, cluster="trace:trace.csv")
    assert status == 2
    assert said == "paceline: trace.csv, line 3, column compute_s: compute_s=-3.0 is not a number in [0, inf)\n"
    assert train(paceline, cluster="trace:missing.csv")[0] == 2


def test_censored_tasks_that_are_awaited_are_refused_unless_imputed(paceline):
    assert train(paceline, out="run", protocol="k_sync(k=1)", cluster="2*exp(mean=1)", stop="updates=30")[0] == 0
    assert paceline("trace", "run", "--out", "trace.csv")[0] == 0
    status, said = train(paceline, cluster="trace:trace.csv")
    assert status == 2
    assert "30 of 60 rows of trace.csv are censored" in said
    assert "bsp never interrupts work, so it waits for its end: give --censored km" in said
    assert said.count("\n") == 1
    assert train(paceline, cluster="trace:trace.csv", censored="km")[0] == 0
    status, said = train(paceline, censored="km")
    assert (status, "give --cluster trace:FILE" in said) == (2, True)


def test_a_folder_without_a_run_has_no_trace(paceline):
    status, said = paceline("trace", "nowhere")
    assert (status, "there is no folder nowhere" in said) == (2, True)


@parametrize_few("option", [["--out", "other"], ["--overwrite"]], keep=1)
def test_a_resumed_run_keeps_its_folder(paceline, tmp_path, option):
    assert train(paceline, out="run")[0] == 0
    log = (tmp_path / "run" / "events.jsonl").read_bytes()
    status, said = paceline("train", "--resume", "run", "--stop", "updates=9", *option)
    assert (status, "--resume continues the run in run" in said) == (2, True)
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == log


def test_a_parent_folder_is_refused_with_the_name_of_a_run(paceline):
    assert train(paceline, out="runs/one")[0] == 0
    status, said = paceline("replay", "runs")
    assert (status, "runs is not the folder of a run; expected one with run.json in it, as runs/one" in said) == (
        2,
        True,
    )


def test_a_trace_overwrites_a_file_only_on_request(paceline, tmp_path):
    assert train(paceline, out="run")[0] == 0
    (tmp_path / "trace.csv").write_text("precious")
    status, said = paceline("trace", "run")
    assert (status, "trace.csv exists already; give another file, or --overwrite" in said) == (2, True)
    assert paceline("trace", "run", "--overwrite")[0] == 0
    status, said = paceline("trace", "run", "--out", "nowhere/trace.csv")
    assert (status, "there is no folder nowhere for trace.csv" in said) == (2, True)


def test_an_unknown_toml_key_is_named_with_its_line(paceline, tmp_path):
    (tmp_path / "cluster.toml").write_text('workers = 4\ntimming = "exp(mean=1)"\n')
    status, said = train(paceline, cluster="cluster.toml")
    assert status == 2
    assert "cluster.toml, line 2: 'timming' is not known; did you mean 'timing'?" in said


def test_the_users_own_traceback_is_shown(paceline, tmp_path):
    (tmp_path / "broken_job.py").write_text("def job():\n    return 1 / 0\n")
    status, said = train(paceline, job="broken_job:job")
    assert status == 2
    assert "broken_job.py" in said
    assert "ZeroDivisionError" in said
    assert said.splitlines()[-1] == "paceline: 'broken_job:job' raised ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"not gzip", "train-images"), (gzip.compress(struct.pack(">4I", 2051, 60000, 28, 28)), "train-images")],
    ids=["wrong magic", "truncated"],
)
def test_damaged_data_files_are_named(paceline, tmp_path, content, words):
    folder = tmp_path / "data/mnist"
    folder.mkdir(parents=True)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(content)
    status, said = train(paceline, job="mnist")
    assert status == 2
    assert words in said
    assert said.count("\n") == 1


def test_an_existing_folder_is_refused_unless_overwritten(paceline, tmp_path):
    assert train(paceline, out="run")[0] == 0
    status, said = train(paceline, out="run")
    assert (status, "run exists already; give another folder, or --overwrite" in said) == (2, True)
    arguments = [word for option in {**TRAIN, "--out": "run"}.items() for word in option]
    assert paceline("train", "digits", *arguments, "--overwrite")[0] == 0


def simulate_training(protocol="bsp", stop="updates=3", n=2, **changes):
    return pl.train(tiny_job(**changes), protocol=protocol, cluster=pl.Cluster(n), stop=stop)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3).requires_grad_(False)


JOBS = [
    ({"model": Frozen}, "the model has no parameters to train"),
    ({"model": lambda: nn.EmbeddingBag(9, 3, sparse=True)}, "makes sparse gradients"),
    ({"loss": nn.CrossEntropyLoss(reduction="none")}, "the loss is not a scalar"),
    ({"batch_size": 97}, "a data set of 96 is smaller than a batch of 97"),
    (
        {"data": torch.utils.data.TensorDataset(torch.zeros(0, 5), torch.zeros(0))},
        "the data set is empty; give data with samples",
    ),
    ({"batch_size": 0}, "batch_size = 0, expected a whole number >= 1"),
    ({"sharding": "partitioned", "batch_size": 60}, "one of 2 shards of 96 samples is smaller than a batch of 60"),
    ({"loss": None}, "expected either loss="),
    ({"lr_rule": "linear"}, "lr_rule='linear', expected 'constant', 'proportional' or 'noise'"),
    ({"sampling": "random"}, "sampling='random', expected 'replacement' or 'epoch'"),
    ({"optimizer": torch.optim.LBFGS}, "LBFGS evaluates the loss within a step"),
    ({"optimizer": lambda parameters: None}, "optimizer() returned NoneType"),
    ({"clip_norm": 0}, "clip_norm = 0, expected a number > 0"),
    ({"microbatches": 9}, "9 microbatches of a minibatch of 8"),
]


@pytest.mark.parametrize(("changes", "words"), JOBS, ids=[words for _, words in JOBS])
def test_invalid_jobs_are_refused(changes, words):
    with pytest.raises(pl.UsageError) as refusal:
        simulate_training(**changes)
    assert words in str(refusal.value)


def test_sparse_gradients_of_a_function_are_refused():
    with pytest.raises(pl.UsageError, match="makes sparse gradients"):
        simulate_training(model=SparseFunction, data=indexed(), loss=F.cross_entropy)


class SparseFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(9, 3))

    def forward(self, indices):
        return F.embedding(indices, self.table, sparse=True)


def indexed():
    return torch.utils.data.TensorDataset(torch.arange(64) % 9, torch.arange(64) % 3)


def test_accuracy_without_evaluation_data_is_refused():
    said = r"stop accuracy>=0\.9 needs evaluations, but job tiny has no evaluation data; give it eval_data"
    with pytest.raises(pl.UsageError, match=said):
        simulate_training(stop="accuracy=0.9")


@pytest.mark.parametrize("knobs", [{"max_staleness": float("inf"), "on_update": "interrupt"}, {"max_lead": 2}])
def test_contradicting_knobs_are_refused(knobs):
    with pytest.raises(pl.UsageError, match=r"never interrupts|has no effect"):
        pl.plans.Protocol(**{"quorum": "all", "max_staleness": 0, "refill": "update", **knobs})


def test_repeated_non_finite_gradients_end_the_run_and_keep_its_events(tmp_path):
    job = tiny_job(loss=never_finite)
    result = pl.train(job, protocol="asp", cluster=pl.Cluster(2), stop="updates=99", out=tmp_path / "run")
    assert result.stopped_by == "not_finite"
    assert "10 gradients in a row of worker" in result.reason
    assert "at update 0" in result.reason
    assert (tmp_path / "run/events.jsonl").read_text().count("not finite") >= 10


def never_finite(output, target):
    return F.cross_entropy(output, target) * float("nan")


def test_a_full_disk_stops_the_run_with_an_error(tmp_path):
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(pl.RunError, match=r"cannot write .*events\.jsonl: .*; the run stopped"):
            pl.train(tiny_job(), protocol="asp", cluster=pl.Cluster(2), stop="updates=9999", out=tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len((tmp_path / "run/events.jsonl").read_text().splitlines()) > 20


def test_an_empty_training_set_is_refused():
    with pytest.raises(pl.UsageError, match="the data set is empty; give data with samples"):
        simulate_training(data=dataset(samples=0))


def forgets(model, batch):
    model.zero_grad()
    return F.cross_entropy(model(batch[0]), batch[1])


def with_float8():
    model = nn.Linear(2, 3)
    model.register_buffer("scale", torch.ones(1).to(torch.float8_e4m3fn))
    return model


MISUSES = [
    ({"data": torch.utils.data.DataLoader(dataset(), batch_size=None)}, "data is a DataLoader with batch_size=None"),
    (
        {"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)},
        "expected a function from the parameters to an optimizer",
    ),
    ({"model": lambda: nn.LazyLinear(3)}, "weight of the model has no shape yet, because its layer is lazy"),
    ({"model": lambda: nn.Linear(2, 3, device="meta")}, "weight of the model is on the meta device"),
    ({"model": lambda: nn.Sequential(nn.Linear(2, 3), nn.SyncBatchNorm(3))}, "has a SyncBatchNorm (1), which would"),
    ({"model": with_float8}, "scale of the model is of torch.float8_e4m3fn, whose numbers torch cannot add"),
    ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "ReduceLROnPlateau needs a metric"),
    ({"loss": None, "step": forgets, "microbatches": 2}, "do not call zero_grad() in it"),
]


@pytest.mark.parametrize(("changes", "words"), MISUSES, ids=[words for _, words in MISUSES])
def test_invalid_use_of_a_job_is_refused(changes, words):
    with pytest.raises(pl.UsageError) as refusal:
        simulate_training(**changes)
    assert words in str(refusal.value)


@pytest.mark.parametrize("given", [{"cluster": 4}, {"stop": 10}, {"job": "digits"}, {"protocol": 3}])
def test_arguments_of_the_wrong_type_are_refused(given):
    arguments = {"job": tiny_job(), "protocol": "bsp", "cluster": pl.Cluster(2), "stop": "updates=1", **given}
    with pytest.raises(pl.UsageError, match="expected "):
        pl.train(arguments.pop("job"), **arguments)


def test_a_stalled_simulation_is_an_error():
    cluster = pl.Cluster(1, faults=[pl.Fault(worker=0, draw=3)])
    with pytest.raises(pl.RunError, match="after 2 of 9 updates: no live worker will deliver another gradient"):
        pl.simulate("asp", cluster, updates=9)
