"""Commands that lead a second process to the same call, and those that do not."""

import multiprocessing
import subprocess
import sys

import pytest
from jupyter_client.manager import run_kernel

from paceline.processes.rerun import can_run_again

ASK = "from paceline.processes.rerun import can_run_again; print(can_run_again())"
CHILD = f"""
import multiprocessing

def ask():
    {ASK}

if __name__ == "__main__":
    process = multiprocessing.get_context("METHOD").Process(target=ask)
    process.start()
    process.join()
"""


def printed(*command, **options):
    """Return what a command prints."""
    ended = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True, **options)
    return ended.stdout.strip()


@pytest.mark.slow
@pytest.mark.processes
def test_scripts_and_modules_can_be_run_again_but_neither_statements_nor_child_processes(tmp_path):
    (tmp_path / "asking.py").write_text(ASK)
    assert printed("asking.py", cwd=tmp_path) == "True"
    assert printed("-u", "asking.py", "--seed", "1", cwd=tmp_path) == "True"
    assert printed("-m", "asking", cwd=tmp_path) == "True"
    assert printed("-c", ASK) == "False"
    assert printed("-", input=ASK) == "False"
    assert printed(input=ASK) == "False"
    assert printed("-m", "IPython", "-c", ASK) == "False"
    for method in ("spawn", "fork"):
        (tmp_path / f"{method}.py").write_text(CHILD.replace("METHOD", method))
        assert printed(f"{method}.py", cwd=tmp_path) == "False"


@pytest.mark.slow
def test_a_notebook_cannot_be_run_again():
    texts = []
    with run_kernel(kernel_name="python3") as client:
        client.execute_interactive(ASK, output_hook=lambda message: texts.append(message["content"].get("text")))
    assert "False\n" in texts


def test_a_test_cannot_be_run_again():
    assert multiprocessing.parent_process() is None
    assert not can_run_again()
