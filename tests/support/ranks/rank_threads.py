"""The ranks of a job as threads of this process, which reach each other in memory: a run takes milliseconds.

The functions have the names of those in `ranks`, which starts processes.
"""

import threading
from collections import Counter, OrderedDict
from contextlib import contextmanager

from torch.optim import optimizer as torch_optimizer

import paceline as pl
from machine_speed import scaled
from memory_transport import MemoryNetwork, MemoryTransport
from paceline.catalogue.parser import parse_plan
from paceline.clusters.launch_env import SERVER, SIDECAR, LaunchEnv
from paceline.core.duration import Duration
from paceline.engines.distributed import Host, Lifecycle
from paceline.engines.signals import Signals
from paceline.protocols.protocol import as_plan
from paceline.recording.run_folder import RunFolder
from paceline.run.checkpointer import CheckpointPolicy
from paceline.run.config import RunConfig
from paceline.run.resume import Resumption
from paceline.run.session import Session
from paceline.run.train import join_run, run_session, stand_by
from ranks import launchers, portable

LIMIT_S = scaled(20)
TOKEN = "a secret of the tests that is hard to guess"


class SharedHooks(OrderedDict):
    """Hooks of all optimizers of a process, which one rank may change while an optimizer of another one steps."""

    def values(self):
        return list(super().values())


torch_optimizer._global_optimizer_pre_hooks = SharedHooks()


class Killed(BaseException):
    """This rank was killed."""


class ThreadProcess(Lifecycle):
    """Thread in which a rank runs as if it were a process.

    Attributes:
        faults: how often each kind of scripted fault has fired.
        thread: thread of the rank, None if this is the thread of the test.
        answer: result of the rank, or what it has raised.
        leave: what SIGTERM calls; None while the rank does not wait for work.
    """

    def __init__(self, ranks):
        self._own_transport = ranks.make_transport(self.on_use)
        self._start_lock = None
        self.has_started = threading.Event()
        self._over = threading.Event()
        self._is_killed = False
        self.fault_actions = {"die": self.die, "hang": self.hang}
        self.faults = Counter()
        self.thread = None
        self.answer = None
        self.leave = None
        self.host = Host(lifecycle=self, start_sidecar=ranks.start_sidecar, make_transport=self.transport)

    def begin_start(self, lock):
        """Start alone: the model of a rank depends on torch's random numbers, which belong to the whole process."""
        lock.acquire()
        self._start_lock = lock

    def end_start(self):
        """Let other ranks start."""
        self.has_started.set()
        lock, self._start_lock = self._start_lock, None
        if lock is not None:
            lock.release()

    def on_use(self):
        self.end_start()
        if self._over.is_set():
            raise Killed

    def set_num_threads(self, count):
        if self._is_killed:
            raise Killed

    def transport(self, cluster, security):
        self._own_transport.token = cluster.ranks.token
        return self._own_transport

    def signals(self, notice):
        return Signals(notice)

    def on_joined(self, pause, resume):
        pass

    def on_server(self, server):
        pass

    @contextmanager
    def leaving_on_sigterm(self, leave):
        self.leave = leave
        yield
        self.leave = None

    def kill(self):
        """Let all its connections end now; its thread ends when it notices."""
        self.end_start()
        self._is_killed = True
        self._over.set()  # first: it must not reach another server when it notices
        self._own_transport.kill()

    def disconnect(self):
        """Close all its connections, as a broken link does."""
        self._own_transport.disconnect()

    def die(self):
        self.faults["die"] += 1
        self.kill()
        raise Killed

    def hang(self):
        self.faults["hang"] += 1
        self._over.wait()
        raise Killed


class Sidecar:
    """Process beside a rank, which is a thread here; None for one that the test starts itself."""

    def __init__(self, process=None):
        self._process = process

    @property
    def status(self):
        return 1 if isinstance(self._process.answer, Exception) else 0

    def check(self):
        pass

    def kill(self):
        if self._process is not None:
            self._process.kill()

    def terminate(self):
        if self._process is not None:
            self._process.leave("SIGTERM")

    def wait(self, timeout_s):
        self.stop()

    def stop(self, timeout_s=LIMIT_S):
        if self._process is not None:
            self._process.thread.join(min(timeout_s, LIMIT_S))
            self._process.kill()
            self._process.thread.join(LIMIT_S)


class Job:
    """Starts ranks as threads, and keeps what became of them.

    Args:
        world_size: number of ranks.
        job: job that they train.
        torchrun: arguments of `pl.Torchrun`, for every rank.
        nodes: number of hosts, with as many ranks on each.
        settings: arguments of `pl.train`, for every rank.
    """

    def __init__(self, world_size, job, torchrun=None, nodes=1, **settings):
        self._world_size = world_size
        self._nodes = nodes
        self._job = job
        self._torchrun = {"start_timeout_s": scaled(10.0), **(torchrun or {})}
        self._settings = {"seed": 1, **settings}
        self._network = MemoryNetwork()
        self._starting = threading.Lock()
        self._is_training = threading.Event()
        self._all = []
        self.processes = {}  # the last one of each rank, by rank, or by worker for those beside a rank

    def make_transport(self, on_use):
        """Return the transport of one rank."""
        return MemoryTransport(self._network, on_use)

    def start(self, rank, **changes):
        """Start a rank, or start it once more, perhaps with other settings."""
        return self._start(rank, self._environment(rank, changes.pop("token", TOKEN)), changes)

    def start_shards(self):
        """Start the servers of all shards but the first."""
        for shard in range(1, self._torchrun.get("shards", 1)):
            self.start_shard(shard)

    def start_shard(self, shard, **changes):
        """Start the server of a shard."""
        return self.start_sidecar(self._cluster(self._environment(0), {}).n + shard, by_test=True, **changes)

    def start_sidecar(self, worker, server=None, *, by_test=False, **changes):
        cluster = self._cluster(self._environment(0), {}).fitted_to(plan_of(self._settings["protocol"]))
        if worker == cluster.standby_number and cluster.standby:
            environment = {**self._environment(self._world_size - 1), SIDECAR: str(worker)}
            return Sidecar(self._start("standby", environment, changes))
        if worker > cluster.n and not by_test:
            return Sidecar()
        rank = cluster.ranks_of_shards[worker - cluster.n] if worker > cluster.n else 0
        environment = {**self._environment(rank), SIDECAR: str(worker)}
        if server is not None:
            environment[SERVER] = "{}:{}".format(*server)
        return Sidecar(
            self._start(f"shard {worker - cluster.n}" if worker > cluster.n else "beside", environment, changes)
        )

    def start_workers(self):
        self.start_shards()
        for rank in range(1, self._world_size):
            self.start(rank)

    def start_all(self):
        self.start(0)
        self.start_workers()

    def serve(self):
        """Be rank 0 in this thread, and return its result."""
        process = self.processes[0] = ThreadProcess(self)
        self._all.append(process)
        try:
            return self._train(process, self._environment(0), {})
        finally:
            process.kill()

    def end(self, rank):
        """Return a rank's result, or raise what it has raised; None if it was killed."""
        process = self.processes[rank]
        process.thread.join(LIMIT_S)
        if process.thread.is_alive():
            raise TimeoutError(f"rank {rank} does not end")
        if isinstance(process.answer, Killed):
            return None
        if isinstance(process.answer, BaseException):
            raise process.answer
        return process.answer

    def join(self, rank):
        """Wait until a rank has ended."""
        self.processes[rank].thread.join(LIMIT_S)
        assert not self.processes[rank].thread.is_alive()

    def started(self, rank):
        """Wait until a rank uses the network."""
        assert self.processes[rank].has_started.wait(LIMIT_S)

    def when_ended(self, rank, act):
        """Do something in another thread when a rank has ended."""
        threading.Thread(target=lambda: (self.join(rank), act()), daemon=True).start()

    def await_training(self):
        """Wait until some updates have been made."""
        assert self._is_training.wait(LIMIT_S), "no update was made"

    def faults(self, kind):
        """Return how often a fault of this kind has fired."""
        return sum(process.faults[kind] for process in self._all)

    def kill_all(self):
        for process in self._all:
            process.kill()
        for process in self._all:
            if process.thread is not None:
                process.thread.join(LIMIT_S)
                assert not process.thread.is_alive(), "a rank does not end"

    def _start(self, name, environment, changes):
        process = self.processes[name] = ThreadProcess(self)
        self._all.append(process)

        def run():
            try:
                process.answer = self._train(process, environment, changes)
            except BaseException as error:
                process.answer = error
            finally:
                process.kill()

        process.thread = threading.Thread(target=run, daemon=True, name=f"rank {name}")
        process.thread.start()
        return process

    def _environment(self, rank, token=TOKEN):
        local = self._world_size // self._nodes
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_WORLD_SIZE": str(local),
            "LOCAL_RANK": str(rank % local),
            "GROUP_RANK": str(rank // local),
            "GROUP_WORLD_SIZE": str(self._nodes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_MAX_RESTARTS": "-1",  # as `paceline run` gives it
            "PACELINE_TOKEN": token,
        }

    def _cluster(self, environment, changes):
        return pl.Torchrun(**{**self._torchrun, **changes}, ranks=LaunchEnv.from_environment(environment))

    def _train(self, process, environment, changes):
        process.begin_start(self._starting)
        given = {**self._settings, "job": self._job, **changes}
        plan = plan_of(given["protocol"])
        cluster = self._cluster(environment, given.pop("torchrun", {})).fitted_to(plan)
        every = given.get("evaluate_every")
        config = RunConfig(
            job=given["job"],
            plan=plan,
            cluster=cluster,
            stop=pl.Stop.parse(given["stop"]),
            seed=given["seed"],
            evaluate_every=Duration.parse(every) if every else None,
            worker_timeout_s=given.get("worker_timeout_s"),
            measure_steps=given.get("measure_steps", False),
            folder=given.get("resume") or given.get("out"),
        )
        if cluster.is_standby:
            policy = CheckpointPolicy(Duration("updates", 10**9), 1)
            folders = {name: given.get(name) for name in ("out", "resume")}
            result = stand_by(config, process.host, **folders, callbacks=given.get("callbacks", []), policy=policy)
            return portable((result, result.history.records))
        if not cluster.is_server:
            result = join_run(config, process.host)
            return portable((result, result.history.records))
        session = Session(config, process.host)
        folder, resumption = given.get("out"), given.get("resume")
        if resumption is not None:
            resumption = Resumption(resumption, session, False)
            folder = RunFolder(given["resume"], session.configuration, overwrite=True, keep=resumption.kept)
        elif folder is not None:
            folder = RunFolder(folder, session.configuration)
        saved = given.get("checkpoint_every", "seconds=60")
        policy = CheckpointPolicy(config.in_gradients(Duration.parse(saved)), given.get("keep_checkpoints", 3))
        callbacks = [Training(self._is_training), *given.get("callbacks", [])]
        result = run_session(session, folder, resumption, callbacks, policy)
        return portable((result, result.history.records))


def plan_of(protocol):
    return parse_plan(protocol) if isinstance(protocol, str) else as_plan(protocol)


class Training(pl.callbacks.Callback):
    """Sets an event when some updates have been made."""

    def __init__(self, is_training):
        self._is_training = is_training

    def on_update(self, update):
        if update.version == 3:
            self._is_training.set()


ranks, run = launchers(Job)
