"""Part of a rank in a run without a server: the user's optimizer steps, and the ranks average by all-reduce."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.clusters.torchrun import Torchrun
from paceline.core.stop import Stop
from paceline.engines.distributed import Host
from paceline.jobs.job import Job
from paceline.protocols.protocol import Plan
from paceline.recording.callback import Callback
from paceline.run.config import RunConfig
from paceline.run.session import take_part
from paceline.run.train import run_session
from paceline.user_loop.data.loop_data import ATTACHED, LoopData, LoopJob, UserLoop
from paceline.user_loop.rank_part import RankPart
from paceline.user_loop.run_end import end_of
from paceline.user_loop.run_options import RunOptions
from paceline.user_loop.server.description import computed_by_the_user
from paceline.user_loop.step_policies import CommonSteps
from paceline.user_loop.worker.exchange import Exchange, LoopEnd
from paceline.user_loop.worker.loop_lifecycle import LoopLifecycle
from paceline.user_loop.worker.loop_optimizer import LoopOptimizer, check_own_steps, shared_parameters
from paceline.user_loop.worker.loop_replicas import LoopReplicas


class AllReducePart(RankPart):
    """Part of one rank in a run without a server, which rank 0 records.

    The step is made with the gradient that the protocol gives, as the mean over the ranks. A rank that has no minibatch
    left makes the steps of the others without a call of the user.

    Args:
        loop: parts of the loop.
        plan: protocol of each phase.
        cluster: how the processes reach each other.
        options: seed, folder, checkpoints and limits.
        callbacks: callbacks at rank 0.

    Raises:
        UsageError: the optimizer needs more than a gradient, or the model is on several devices.
    """

    def __init__(
        self, loop: UserLoop, plan: Plan, cluster: Torchrun, options: RunOptions, callbacks: Sequence[Callback]
    ) -> None:
        check_own_steps(loop)
        self.steps = CommonSteps()
        self.ranks = cluster.ranks.world_size
        self.exchange = Exchange()
        self.lifecycle = LoopLifecycle(has_server=False)
        replicas = LoopReplicas(self.exchange, loop, shared_parameters(loop.model))
        self.host = Host(lifecycle=self.lifecycle, make_replica=replicas, device=loop.device)
        self._job = make_stepping_job(loop, self.exchange)
        self._plan = plan
        self._cluster = cluster
        self._options = options
        self._callbacks = callbacks

    def config(self, stop: Stop) -> RunConfig:
        """Return the configuration of this rank."""
        return self._options.config(self._job, self._plan, self._cluster, stop)

    def start_server(self, stop: Stop) -> None:
        """Start none."""

    def take_part(self, config: RunConfig) -> LoopEnd:
        """Take part in the run until its end."""
        if not self._cluster.is_server:
            return LoopEnd(*take_part(config, self.host))
        session, folder, resumption, policy = self._options.open_session(config, self.host)
        callbacks = [*self._callbacks, *self._options.callbacks()]
        result = run_session(session, folder, resumption, callbacks, policy)
        return LoopEnd(result.model, end_of(session, result))


def make_stepping_job(loop: UserLoop, exchange: Exchange) -> Job:
    """Return the job of a rank whose gradients and steps are computed in the user's loop.

    Args:
        loop: parts of the loop.
        exchange: exchange with the loop.
    """
    shared = shared_parameters(loop.model, with_frozen=True)
    return LoopJob(
        name=ATTACHED,
        model=lambda: shared,
        optimizer=lambda parameters: LoopOptimizer(loop.optimizer, exchange),
        step=computed_by_the_user,
        clip_norm=loop.clip_norm,
        **LoopData.of_loop(loop).job_settings(),
    )
