"""Download of public data sets, checked by SHA-256."""

import hashlib
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import urlopen

from paceline.errors import RunError, UsageError, did_you_mean

TIMEOUT_S = 30


@dataclass(frozen=True)
class RemoteFile:
    """File ``name`` in each of the folders ``mirrors`` (URLs)."""

    name: str
    sha256: str
    mirrors: tuple[str, ...]


_TORONTO = ("https://www.cs.toronto.edu/~kriz",)
_MIRRORS = {
    "mnist": ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
    "cifar10": _TORONTO,
    "cifar100": _TORONTO,
}
_SHA256 = {
    "mnist": {
        "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
    "cifar10": {"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
    "cifar100": {"cifar-100-binary.tar.gz": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"},
}
SOURCES: Mapping[str, tuple[RemoteFile, ...]] = {
    name: tuple(RemoteFile(file, sha256, _MIRRORS[name]) for file, sha256 in files.items())
    for name, files in _SHA256.items()
}


def fetch(name: str, folder: str | Path, sources: Mapping[str, tuple[RemoteFile, ...]] = SOURCES) -> None:
    """Download a data set into ``folder``, from which the job of the same name reads it.

    All files are checked against their known SHA-256 before any appears in the folder. A ``.tar.gz`` is unpacked,
    without the folders inside it.

    Args:
        name: "mnist" (11 MB), "cifar10" or "cifar100" (170 MB each).
        folder: target folder, created if it is missing.
        sources: files of each data set.

    Raises:
        UsageError: there is no such data set, or the folder cannot be written.
        RunError: no mirror has a file with the known SHA-256.
    """
    if name not in sources:
        raise UsageError(f"no data set is called '{name}'{did_you_mean(name, sources)}")
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Inside the folder, so that a file is renamed in one step.
        scratch = TemporaryDirectory(prefix=".fetch-", dir=folder)
    except OSError as error:
        raise UsageError(f"cannot write to '{folder}': {error.strerror}; give another folder") from error
    with scratch:
        _fill(Path(scratch.name), sources[name])
        for path in [path for path in Path(scratch.name).rglob("*") if path.is_file()]:
            path.replace(folder / path.name)


def _fill(scratch: Path, files: tuple[RemoteFile, ...]) -> None:
    for file in files:
        target = scratch / file.name
        _download(file, target)
        if file.name.endswith(".tar.gz"):
            with tarfile.open(target) as archive:
                archive.extractall(scratch, filter="data")  # refuses a path that leads out of the folder
            target.unlink()


def _download(file: RemoteFile, target: Path) -> None:
    failures = []
    for mirror in file.mirrors:
        url = f"{mirror}/{file.name}"
        try:
            found = _copy(url, target)
        except (OSError, HTTPException) as error:
            failures.append(f"{url}: {getattr(error, 'reason', error)}")
            continue
        if found == file.sha256:
            return
        failures.append(f"{url}: its SHA-256 is {found}, expected {file.sha256}")
    raise RunError(f"cannot fetch {file.name}; " + "; ".join(failures))


def _copy(url: str, target: Path) -> str:
    """Write the content of ``url`` to ``target``, and return its SHA-256 in hexadecimal."""
    with urlopen(url, timeout=TIMEOUT_S) as response, target.open("w+b") as out:
        shutil.copyfileobj(response, out)
        out.seek(0)
        return hashlib.file_digest(out, "sha256").hexdigest()
