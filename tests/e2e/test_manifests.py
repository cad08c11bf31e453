"""Manifests of examples/: they agree with themselves, and what they start is run by processes of this machine."""

import os
import re
import signal
import subprocess
import urllib.request

import pytest

from launched_commands import (
    await_records,
    children,
    environment_of,
    environment_with,
    kill,
    outputs,
    statuses,
)
from machine_speed import scaled
from paceline.clusters.job_token import make_token
from paceline.core.records import RunEnded, RunResumed, UpdateMade, WorkerJoined, WorkerLost
from paceline.recording.run_folder import SavedRun
from paceline.watch.address import PORT
from paths import ROOT
from ranks import free_port
from selections import parametrize_few

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs/how-to/kubernetes.md").read_text(encoding="utf-8")
KUBERNETES = (EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8")
OBJECTS = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(KUBERNETES)}
RANK_0, WORKERS = OBJECTS["Job", "digits"]["spec"], OBJECTS["Job", "digits-workers"]["spec"]
IMAGE = "registry.example/paceline:0.2.0"
METRICS_PORT = "9464"
PORTS = STORE, SERVER = "29500", "29501"
FOREVER = "updates=1000000"
pytestmark = pytest.mark.timeout(300)  # a command is seconds of importing for each rank


def container(job):
    [one] = job["template"]["spec"]["containers"]
    return one


def settings():
    return OBJECTS["ConfigMap", "digits"]["data"]


def action(job, status):
    """Return what Kubernetes does about a pod of a Job that has ended with a status."""
    for rule in job["podFailurePolicy"]["rules"]:
        if status in rule.get("onExitCodes", {}).get("values", []):
            return rule["action"]
    return "Count"


@pytest.fixture
def start(tmp_path):
    """Start commands in the test's folder; nothing of them is left afterwards."""
    started = []

    def begin(command, variables):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        here = [word.replace("/runs", str(tmp_path)) for word in command]
        started.append(subprocess.Popen(here, cwd=tmp_path, env=environment_with(**variables), **options))
        return started[-1]

    yield begin
    for process in started:
        kill(process)


class Pods:
    """Pods of the two Jobs, which are processes here."""

    def __init__(self, start):
        self._start = start
        self._ports = {port: str(free_port()) for port in (METRICS_PORT, *PORTS)}
        self._token = make_token()

    def rank_0(self, stop):
        return self._pod(RANK_0, stop, {})

    def worker(self, index, stop):
        return self._pod(WORKERS, stop, {"JOB_COMPLETION_INDEX": str(index)})

    def all(self, stop):
        return [self.rank_0(stop), *(self.worker(index, stop) for index in range(WORKERS["completions"]))]

    def answer(self, probe):
        """Return the status of a probe's request."""
        port = self._ports[METRICS_PORT]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{probe['httpGet']['path']}", timeout=scaled(10)) as answer:
            return answer.status

    def _pod(self, job, stop, variables):
        pod = container(job)
        run = re.sub(r"--stop \S+", f"--stop {stop}", settings()["RUN"])
        given = {**settings(), "RUN": self._here(run), **variables, "PACELINE_TOKEN": self._token}
        return self._start([self._here(word) for word in pod["command"] + pod["args"]], given)

    def _here(self, text):
        """Return a text of the manifest with the address of this machine, and ports that are free here."""
        for port, free in self._ports.items():
            text = text.replace(port, free)
        return text.replace("digits:", "127.0.0.1:")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "of_rank_0", "of_workers"),
    [(signal.SIGTERM, (130, "Ignore"), (130, "Ignore")), (signal.SIGKILL, (-9, "Count"), (1, "Count"))],
    ids=["moved", "killed"],
)
def test_pods_of_kubernetes_come_back_in_place(number, of_rank_0, of_workers, start, tmp_path):
    pods, folder = Pods(start), tmp_path / "digits"
    rank_0, first, *others = pods.all(FOREVER)
    await_records(folder, UpdateMade, 20)
    assert {pods.answer(container(RANK_0)[probe]) for probe in ("livenessProbe", "readinessProbe")} == {200}

    first.send_signal(signal.SIGTERM)  # the scheduler moves a worker
    assert statuses([first]) == [143]
    assert action(WORKERS, 143) == "Ignore"
    again = pods.worker(0, FOREVER)
    await_records(folder, WorkerJoined, 1)

    rank_0.send_signal(number)
    assert statuses([rank_0, again, *others]) == [of_rank_0[0], *[of_workers[0]] * 3]
    assert (action(RANK_0, of_rank_0[0]), action(WORKERS, of_workers[0])) == (of_rank_0[1], of_workers[1])

    made = len(SavedRun(folder).history.of(UpdateMade))
    outputs(pods.all(f"updates={made + 30}"))
    history = SavedRun(folder).history
    [resumed] = history.of(RunResumed)
    assert resumed.version in ({made} if number == signal.SIGTERM else range(1, made + 1))
    assert history.of(RunEnded)[-1].outcome == "updates"
    versions = [record.version for record in history.of(UpdateMade)]
    assert versions == list(range(1, len(versions) + 1))


def test_a_wrong_command_is_not_started_again():
    assert (action(RANK_0, 2), action(WORKERS, 2)) == ("FailJob", "FailIndex")


@parametrize_few("version", ["1.31", "1.33", "1.37"], keep=1)
def test_the_manifest_is_what_kubernetes_takes(version):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for manifest in OBJECTS.values():
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_manifest_agrees_with_itself():
    service, claim = OBJECTS["Service", "digits"], OBJECTS["PersistentVolumeClaim", "digits"]
    assert WORKERS["completions"] == WORKERS["parallelism"] == int(settings()["NODES"]) - 1
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "digits"}
    assert f"--rdzv-endpoint {service['metadata']['name']}:{STORE} " in container(WORKERS)["args"][0]
    assert f"--rdzv-endpoint 127.0.0.1:{STORE} " in container(RANK_0)["args"][0]
    assert f"address=0.0.0.0:{SERVER}," in settings()["RUN"]
    ports = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    assert ports == {"store": int(STORE), "paceline": int(SERVER), "metrics": int(METRICS_PORT)}
    assert ports == {each["name"]: each["containerPort"] for each in container(RANK_0)["ports"]}
    assert f"--metrics 0.0.0.0:{METRICS_PORT}" in container(RANK_0)["args"][0]
    for probe in ("livenessProbe", "readinessProbe"):
        assert container(RANK_0)[probe]["httpGet"]["port"] in ports
    [volume] = RANK_0["template"]["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert [mount["name"] for mount in container(RANK_0)["volumeMounts"]] == [volume["name"]]


def test_both_jobs_get_the_token_that_the_page_creates():
    [(name, key)] = re.findall(r"secret generic (\S+) --from-literal=(\w+)=\$\(paceline token\)", PAGE)
    assert key == "PACELINE_TOKEN"
    assert f"secret generic {name} --from-literal={key}=" in KUBERNETES
    for job in (RANK_0, WORKERS):
        assert {"secretRef": {"name": name}} in container(job)["envFrom"]
        assert {"configMapRef": {"name": "digits"}} in container(job)["envFrom"]


def test_the_page_watches_the_run_of_rank_0():
    [(job, folder)] = re.findall(r"kubectl exec -it job/(\S+) -- paceline watch ([\w/]+)", PAGE)
    assert f"--out {folder}" in " ".join(container(OBJECTS["Job", job]["spec"])["args"]).replace("$where", "--out")
    assert f"kubectl port-forward job/{job} {PORT}" in PAGE


def test_one_image_name_is_to_be_changed():
    assert f"sed s,{IMAGE},YOUR_IMAGE, examples/kubernetes.yaml | kubectl apply -f -" in PAGE
    assert {container(job)["image"] for job in (RANK_0, WORKERS)} == {IMAGE}
    others = [value for (kind, _), value in OBJECTS.items() if kind != "Job"]
    assert "registry" not in str(others)


# --- other systems ---------------------------------------------------------------------------------------------------


def trainjob_node(rank, nodes, port):
    """Return the command of a node of the TrainJob, and the variables that Kubeflow's torch runtime sets for it."""
    trainer = yaml.safe_load((EXAMPLES / "trainjob.yaml").read_text(encoding="utf-8"))["spec"]["trainer"]
    variables = {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
    }
    return trainer["command"] + trainer["args"], variables


def skypilot_node(rank, nodes, port):
    """Return the command of a node of the SkyPilot task, and the variables that SkyPilot sets for it."""
    run = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text(encoding="utf-8"))["run"]
    variables = {
        "SKYPILOT_NUM_NODES": str(nodes),
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * nodes),
    }
    return ["bash", "-c", run.replace("29500", port)], variables


@pytest.mark.slow
@pytest.mark.parametrize("node", [trainjob_node, skypilot_node])
def test_one_worker_is_started_again_alone_and_nodes_that_are_moved_resume(node, start, tmp_path):
    nodes, folder, token = 3, tmp_path / "digits", {"PACELINE_TOKEN": make_token()}

    def start_all(stop):
        port, started = str(free_port()), []
        for rank in range(nodes):
            command, variables = node(rank, nodes, port)
            command = [re.sub(r"--stop \S+", f"--stop {stop}", word) for word in command]
            started.append(start(command, {**variables, **token}))
        return started

    first = start_all(FOREVER)
    await_records(folder, UpdateMade, 20)
    os.kill(next(pid for pid in children(first[2].pid) if environment_of(pid).get("RANK") == "2"), signal.SIGKILL)
    await_records(folder, WorkerJoined, 1)
    for process in first:
        kill(process)
    history = SavedRun(folder).history
    assert [record.worker for record in history.of(WorkerLost)][:1] == [1]
    assert history.of(RunResumed) == []  # no other process was restarted

    told = outputs(start_all(f"updates={len(history.of(UpdateMade)) + 30}"))
    assert "exists already" not in "".join(told)
    assert len(SavedRun(folder).history.of(RunResumed)) == 1
    assert SavedRun(folder).history.of(RunEnded)[-1].outcome == "updates"
