"""The Dockerfile, as far as it can be checked without docker: the files that it names, and what the examples need."""

import os
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import PurePosixPath

import pytest

from paths import ROOT

LINES = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.M))
INSTRUCTIONS = [tuple(line.split(maxsplit=1)) for line in LINES.splitlines() if line]
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def values(kind):
    return [rest for name, rest in INSTRUCTIONS if name == kind]


def is_sent(path):
    """Return whether docker sends a file of the repository to the build."""
    places = [PurePosixPath(path), *PurePosixPath(path).parents]
    return not any(fnmatch(str(place), pattern) for place in places for pattern in IGNORED)


def test_every_line_is_an_instruction():
    assert {name for name, _ in INSTRUCTIONS} == {"FROM", "ARG", "COPY", "RUN", "USER", "WORKDIR"}
    assert INSTRUCTIONS[0][0] == "FROM"


def test_what_is_copied_exists():
    stages = re.findall(r" AS (\w+)", "\n".join(values("FROM")))
    for copied in values("COPY"):
        *options, source, _ = copied.split()
        if options:
            assert [option.removeprefix("--from=") for option in options] == stages
        else:
            assert (ROOT / source).exists()
            assert is_sent(source)


def test_the_wheel_is_built_from_what_is_sent():
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    files = [PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "pyproject.toml"]
    for path in [*files, *wheel["packages"], *wheel["force-include"]]:
        assert is_sent(path), path
    assert not is_sent(".git/HEAD")
    assert not is_sent("src/paceline/__pycache__/cli.pyc")


def test_python_is_new_enough():
    least = tuple(map(int, PROJECT["project"]["requires-python"].removeprefix(">=").split(".")))
    for image in values("FROM"):
        assert tuple(map(int, re.match(r"python:(\d+)\.(\d+)-slim\b", image).groups())) >= least


@pytest.mark.parametrize(("extras", "installed"), [("digits,metrics", "[digits,metrics]"), ("", "")])
def test_the_extras_may_be_empty(extras, installed, tmp_path):
    wheel = tmp_path / "paceline-0.2.0-py3-none-any.whl"
    wheel.touch()
    [line] = [run for run in values("RUN") if "/tmp/wheels" in run]
    pip = 'pip() { while [ $# -gt 1 ]; do shift; done; echo "$1"; }'  # prints its last argument
    command = ["sh", "-c", f"{pip}; {line.replace('/tmp/wheels', str(tmp_path))}"]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "EXTRAS": extras}, check=True)
    assert ended.stdout.strip() == f"{wheel}{installed}"


def test_the_image_of_ray_has_a_version_and_what_the_rayjob_runs():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    page = (ROOT / "docs/how-to/ray.md").read_text(encoding="utf-8")
    recipe = (ROOT / "examples/ray/Dockerfile").read_text(encoding="utf-8")
    base, python = re.match(r"FROM rayproject/ray:(\d+\.\d+)\.\d+-py3(\d+)\n", recipe).groups()
    assert f"ray[train]>={base}" in PROJECT["project"]["optional-dependencies"]["ray"]
    assert int(python) >= int(PROJECT["project"]["requires-python"].removeprefix(">=3."))
    job = yaml.safe_load((ROOT / "examples/ray/rayjob.yaml").read_text(encoding="utf-8"))["spec"]
    [program] = re.findall(r"^python /app/(\S+) ", job["entrypoint"])
    assert "\nCOPY . /app\n" in recipe
    assert (ROOT / program).exists()
    assert is_sent(program)
    groups = [job["rayClusterSpec"]["headGroupSpec"], *job["rayClusterSpec"]["workerGroupSpecs"]]
    [image] = {group["template"]["spec"]["containers"][0]["image"] for group in groups}
    assert not image.endswith(":latest")
    assert f"sed s,{image},YOUR_IMAGE, examples/ray/rayjob.yaml" in page


def test_the_image_has_what_the_manifest_uses():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    arguments = dict(value.split("=") for value in values("ARG"))
    extras = set(arguments["EXTRAS"].split(","))
    assert {"digits", "metrics"} <= extras <= {*PROJECT["project"]["optional-dependencies"]}
    manifests = yaml.safe_load_all((ROOT / "examples/kubernetes.yaml").read_text(encoding="utf-8"))
    [rank_0] = [each for each in manifests if (each["kind"], each["metadata"]["name"]) == ("Job", "digits")]
    assert values("USER") == [str(rank_0["spec"]["template"]["spec"]["securityContext"]["fsGroup"])]
