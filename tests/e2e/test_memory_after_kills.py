"""Memory that processes of a host share, after many of them were killed."""

from contextlib import suppress

import psutil
import pytest

import killed_script
from launched_commands import run_on_ranks

RANKS, KILLS = 4, 3
EACH = 2  # descriptors of a memory: that of its file, and the copy that mmap keeps
MOST_FILES = EACH * (1 + RANKS)  # versions, and the gradient of each rank


def processes_in(folder):
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is not ours
            found += [each.cmdline()] * (each.cwd() == str(folder))
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("last", ["rank", "server"] * 3)
def test_ten_kills_leave_no_memory_no_file_and_no_process(last, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    printed = run_on_ranks(RANKS, killed_script.__file__, marks, KILLS, last, cwd=tmp_path)
    killed = sorted(each.name for each in marks.glob("killed.*"))
    assert killed == ["killed.0.0", *(f"killed.{rank}.{n}" for rank in range(1, RANKS) for n in range(KILLS))], printed
    assert printed.count("stopped") >= 1, printed
    counts = [
        [tuple(map(int, line.split())) for line in each.read_text().splitlines()] for each in marks.glob("files.*")
    ]
    assert len(counts) == 2, "one server before the last kill, and one after it"
    for of_server in counts:
        assert max(shared for shared, _ in of_server) <= MOST_FILES + EACH * RANKS, "of processes that were just lost"
        shared, others = of_server[-1]
        assert shared <= MOST_FILES
        assert others <= of_server[0][1] + RANKS, of_server
    assert processes_in(tmp_path) == []
