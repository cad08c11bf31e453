import sys

import pytest

from paceline.errors import UsageError
from paceline.jobs import JobLoadError, load_job

OWN_JOB = """
from functools import partial
import torch
from paceline.jobs.job import Job
from paceline.jobs import SoftmaxRegression

def make(batch_size=4):
    return Job(
        name="own", model=partial(SoftmaxRegression, 2, 2), optimizer=partial(torch.optim.SGD, lr=0.1),
        data=torch.utils.data.TensorDataset(torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64)),
        batch_size=batch_size, loss=torch.nn.functional.cross_entropy, eval_data=None,
    )

def fails():
    return 1 / 0

own = make()
number = 3
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a module into the current directory, which Python does not search by itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)

    return write


def test_a_ready_made_job_with_settings_in_the_text_and_beside_it():
    pytest.importorskip("sklearn")
    job = load_job("digits(model=net)", batch_size=8)
    assert (job.name, job.batch_size) == ("digits-net", 8)


def test_the_folder_is_a_setting(tmp_path):
    with pytest.raises(UsageError, match=f"cannot read '{tmp_path}/train-images-idx3-ubyte.gz'"):
        load_job(f"mnist(folder={tmp_path}, model=softmax)")
    with pytest.raises(UsageError, match=f"cannot read '{tmp_path}/data_batch_1.bin'"):
        load_job("cifar10", folder=tmp_path)


@pytest.mark.parametrize(("text", "batch_size"), [("mine:own", 4), ("mine:make", 4), ("mine:make(batch_size=2)", 2)])
def test_a_job_from_a_module_in_the_current_directory(write, text, batch_size):
    write("mine", OWN_JOB)
    job = load_job(text)
    assert (job.name, job.batch_size) == ("own", batch_size)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "minst",
            "no job is called 'minst'; did you mean 'mnist'.; for a job of your own, type module:object",
        ),
        ("train.py", "cannot read 'train.py'"),
        ("digits(modle=net)", "digits has no knob 'modle'; did you mean 'model'"),
        ("digits(model=nett)", "no model 'nett'; did you mean 'net'"),
        ("digits(model=3)", "no model '3'; known: net, softmax"),
        ("digits(lr=fast)", r"lr='fast', expected a number"),
        ("cifar10(momentum=1)", r"momentum=1 is not a number in \[0, 1\)"),
        ("cifar10(augment=yes)", "cifar10: augment='yes', expected true or false"),
        ("mnist(folder=2024)", "cannot read '2024/train-images"),
        ("nowhere:job", "no module 'nowhere' in .*; run the command in its folder, or install it"),
        ("mine.py:own", "no module 'mine.py' in .*; leave out '.py'"),
        ("mine:owm", "module 'mine' has no 'owm'; did you mean 'own'"),
        ("mine:nothing", "module 'mine' has no 'nothing'; known: fails, make, own"),
        ("mine:number", "'mine:number' is of type int; expected a Job or a function that returns one"),
        ("mine:own(batch_size=2)", "own has no knobs, but was given 'batch_size'"),
        ("mine:make(size=2)", "make has no knob 'size'"),
    ],
)
def test_an_invalid_text_is_an_error_with_a_remedy(write, text, said):
    write("mine", OWN_JOB)
    with pytest.raises(UsageError, match=said) as caught:
        load_job(text)
    assert not isinstance(caught.value, JobLoadError)
    assert "\n" not in str(caught.value)


def test_a_setting_given_twice_is_refused():
    with pytest.raises(UsageError, match=r"lr is given in 'mnist.lr=1.' and as a setting: give it once"):
        load_job("mnist(lr=1)", lr=2)


def test_an_error_of_a_user_function_keeps_its_traceback(write):
    write("mine", OWN_JOB)
    with pytest.raises(JobLoadError, match=r"^'mine:fails' raised ZeroDivisionError: division by zero$") as caught:
        load_job("mine:fails")
    details = caught.value.details
    assert details.startswith('Traceback (most recent call last):\n  File "')
    assert "mine.py" in details.splitlines()[1]
    assert "return 1 / 0" in details
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("body", "raised", "shown"),
    [
        ("import no_such_package", "ModuleNotFoundError", "import no_such_package"),
        ("def broken(:", "SyntaxError", "def broken(:"),
        ("raise SystemExit(3)", "SystemExit", "raise SystemExit"),
    ],
)
def test_an_import_error_of_a_user_module_keeps_its_traceback(write, body, raised, shown):
    write("bad", body)
    with pytest.raises(JobLoadError, match=f"'bad:job' raised {raised}") as caught:
        load_job("bad:job")
    assert shown in caught.value.details
    assert "importlib" not in caught.value.details
    assert "registry.py" not in caught.value.details


def test_a_paceline_error_inside_a_user_module_is_unchanged(write):
    write("early", "from paceline.errors import UsageError\nraise UsageError('batch_size=0 is too small')")
    with pytest.raises(UsageError, match=r"^batch_size=0 is too small$"):
        load_job("early:job")
