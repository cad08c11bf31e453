"""Lock of a folder, and processes that its holder has forked."""

import os

import pytest

from paceline.recording.lock import FolderLock, is_locked


@pytest.mark.slow
def test_a_forked_process_does_not_keep_a_folder_locked(tmp_path):
    lock = FolderLock(tmp_path, "a run")
    from_child, begun = os.pipe()
    end, to_child = os.pipe()
    if (child := os.fork()) == 0:
        os.close(to_child)  # so that it ends with the parent
        os.write(begun, b"x")
        os.read(end, 1)
        os._exit(0)
    os.read(from_child, 1)
    assert is_locked(tmp_path)
    lock.release()
    is_kept = is_locked(tmp_path)
    os.close(to_child)
    os.waitpid(child, 0)
    assert not is_kept
