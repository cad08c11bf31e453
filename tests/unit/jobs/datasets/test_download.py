import hashlib
import io
import tarfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from paceline.errors import RunError, UsageError
from paceline.jobs.datasets.download import SOURCES, RemoteFile, fetch


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def site(tmp_path):
    """A folder and the address of a local server that offers what is in it."""
    root = tmp_path / "site"
    root.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: QuietHandler(*args, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield root, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def refused():
    """An address where nothing listens."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), QuietHandler)
    server.server_close()
    return f"http://127.0.0.1:{server.server_port}"


def offer(root, name, content):
    (root / name).write_bytes(content)
    return name, hashlib.sha256(content).hexdigest()


def test_only_the_listed_files_are_downloaded(site, tmp_path):
    root, url = site
    files = tuple(RemoteFile(*offer(root, name, name.encode() * 9), (url,)) for name in ("a.gz", "b.gz"))
    fetch("tiny", tmp_path / "deep/data", sources={"tiny": files})
    arrived = {path.name: path.read_bytes() for path in (tmp_path / "deep/data").iterdir()}
    assert arrived == {"a.gz": b"a.gz" * 9, "b.gz": b"b.gz" * 9}


def test_an_archive_is_unpacked_without_its_folder(site, tmp_path):
    root, url = site
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in ("batches/data_batch_1.bin", "batches/test_batch.bin"):
            info = tarfile.TarInfo(name)
            info.size = 4
            archive.addfile(info, io.BytesIO(name[-8:-4].encode()))
    file = RemoteFile(*offer(root, "c.tar.gz", buffer.getvalue()), (url,))
    fetch("tiny", tmp_path / "data", sources={"tiny": (file,)})
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        "data_batch_1.bin",
        "test_batch.bin",
    ]
    assert (tmp_path / "data/test_batch.bin").read_bytes() == b"atch"


def test_the_next_mirror_is_tried(site, refused, tmp_path):
    root, url = site
    file = RemoteFile(*offer(root, "a.gz", b"a"), (refused, f"{url}/nowhere", url))
    fetch("tiny", tmp_path / "data", sources={"tiny": (file,)})
    assert (tmp_path / "data/a.gz").read_bytes() == b"a"


def test_a_wrong_hash_is_an_error_and_keeps_the_old_file(site, tmp_path):
    root, url = site
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.gz").write_bytes(b"mine")
    name, found = offer(root, "a.gz", b"not what was published")
    first = RemoteFile(*offer(root, "first.gz", b"fine"), (url,))
    with pytest.raises(RunError) as caught:
        fetch("tiny", folder, sources={"tiny": (first, RemoteFile(name, "0" * 64, (url,)))})
    assert f"cannot fetch a.gz; {url}/a.gz: its SHA-256 is {found}, expected {'0' * 64}" in str(caught.value)
    assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [("a.gz", b"mine")]


def test_a_refused_connection_is_a_one_line_error(refused, tmp_path):
    file = RemoteFile("a.gz", "0" * 64, (refused,))
    with pytest.raises(RunError, match=rf"^cannot fetch a.gz; {refused}/a.gz: .*Connection refused.*$"):
        fetch("tiny", tmp_path / "data", sources={"tiny": (file,)})


def test_an_unknown_name_is_an_error_with_the_nearest_name(tmp_path):
    with pytest.raises(UsageError, match="no data set is called 'minst'; did you mean 'mnist'"):
        fetch("minst", tmp_path)


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write to '.*file/data': Not a directory; give another folder"):
        fetch("mnist", tmp_path / "file/data")


def test_downloaded_files_are_those_that_the_jobs_read():
    names = [file.name for file in SOURCES["mnist"]]
    assert sorted(names) == [
        f"{split}-{kind}-ubyte.gz" for split in ("t10k", "train") for kind in ("images-idx3", "labels-idx1")
    ]
    for files in SOURCES.values():
        assert all(len(file.sha256) == 64 and file.mirrors for file in files)
