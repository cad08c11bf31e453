"""DBW against the paper's algorithm written down literally, on whole vectors and an interior-point solver."""

from itertools import product

import clarabel
import numpy as np
import scipy.sparse as sp
import torch

import paceline as pl
from paceline.core.records import DecisionMade
from paceline.worker.replica import Replica
from paceline.worker.torch_utils import build_model
from selections import parametrize_few
from tiny_jobs import sgd, tiny_job

N = 5


def chosen(result):
    return [record.k for record in result.history.of(DecisionMade) if record.kind == "quorum"]


def constraints(n):
    """The inequalities x_a <= x_b of problem (17), as pairs of cells."""
    inside = set(product(range(1, n + 1), repeat=2))
    for h, k in inside:
        for a, b in (((h, k), (h, k + 1)), ((h + 1, k), (h, k)), ((k, k), (k + 1, k + 1))):
            if a in inside and b in inside:
                yield a, b


def problem_17(samples, n):
    """Return the smallest optimal x_{k,k} for all k, by an interior-point solver and a search through the order."""
    cells = list(product(range(1, n + 1), repeat=2))
    number = {cell: i for i, cell in enumerate(cells)}
    weight, total = np.zeros(len(cells)), np.zeros(len(cells))
    for h, i, t_s in samples:
        weight[number[h, i]] += 1
        total[number[h, i]] += t_s
    rows = sp.lil_matrix((len(set(constraints(n))), len(cells)))
    below = {cell: {cell} for cell in cells}
    for row, (a, b) in enumerate(set(constraints(n))):
        rows[row, number[a]], rows[row, number[b]] = 1, -1
    for _ in range(2 * n):
        for a, b in constraints(n):
            below[b] |= below[a]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-9
    cones = [clarabel.NonnegativeConeT(rows.shape[0])]
    problem = (sp.csc_matrix(sp.diags(weight)), -total, sp.csc_matrix(rows), np.zeros(rows.shape[0]), cones)
    solution = clarabel.DefaultSolver(*problem, settings).solve()
    assert solution.status == clarabel.SolverStatus.Solved
    x = solution.x
    known = [{number[cell] for cell in below[k, k]} & set(np.flatnonzero(weight)) for k in range(1, n + 1)]
    return [max((x[i] for i in each), default=0.0) for each in known]


class Paper:
    """Eq. (10) to (19), on the vectors of all gradients."""

    def __init__(self, n, D, beta, rate):
        self.n, self.D, self.beta, self.rate = n, D, beta, rate
        self.V, self.N, self.L, self.F, self.k = [], [], [], [], []
        self.samples = []
        self.before = None  # N and V / k of the update before, if it has told them

    def iteration(self, gradients, loss):
        k, g, rate = len(gradients), np.mean(gradients, axis=0), self.rate
        self.F.append(loss)
        before, self.before = self.before, None
        if k == 1:
            return  # (10) is 0 / 0, and (11) and (12) need it
        V = sum(float((each - g) @ (each - g)) for each in gradients) / (k - 1)
        N = max(float(g @ g) - V / k, 0.0)
        self.V.append(V)
        self.N.append(N)
        if before is not None:
            N_before, V_before_by_k = before
            gain = self.F[-2] - self.F[-1]
            self.L.append(2 * (rate * N_before - gain) / (rate**2 * (N_before + V_before_by_k)))
        self.before = (N, V / k)

    def choose(self):
        t = len(self.F)
        if t < 2:
            self.k.append(self.n)
            return self.n
        V, N, L = (np.mean(each[-self.D :]) for each in (self.V, self.N, self.L))
        L = max(L, 0.0)
        gains = [(self.rate - L * self.rate**2 / 2) * N - L * self.rate**2 / 2 * V / k for k in range(1, self.n + 1)]
        times = problem_17(self.samples, self.n)
        ratio = [gain / time_s for gain, time_s in zip(gains, times, strict=True)]
        near = 1e-5 * max(ratio)  # how exact an interior point is
        best = self.n if max(gains) <= 0 else max(i for i in range(self.n) if ratio[i] >= max(ratio) - near) + 1
        if self.F[-1] > self.beta * self.F[-2] and self.k[-1] < self.n:
            best = max(best, self.k[-1] + 1)
        self.k.append(best)
        return best


def by_the_paper(result, job, seed, n, D, beta, rate):
    """Go through a run's own arrivals once more: parameters, gradients and k_t by the paper; return all k_t."""
    replica = Replica(job, seed, n)
    model = build_model(job, seed)
    w = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    paper = Paper(n, D, beta, rate)
    version, opened_s, h = 0, {0: 0.0}, {0: n}
    arrivals = dict.fromkeys(count_of_updates(result), 0)
    used = []
    paper.choose()
    storage, gradient = replica.layout.allocate(), replica.layout.allocate()
    for record in result.history:
        if isinstance(record, pl.callbacks.GradientArrived):
            arrivals[record.version] += 1
            sample = (h[record.version], arrivals[record.version], record.event_s - opened_s[record.version])
            paper.samples.append(sample)
            if record.used:
                torch.nn.utils.vector_to_parameters(w, storage.parameters)
                measured = replica.gradient(record.worker, record.draw, None, storage, gradient)
                used.append(
                    (torch.cat([view.reshape(-1) for view in gradient.parameters]).numpy().copy(), measured.loss)
                )
        elif isinstance(record, pl.callbacks.UpdateMade):
            gradients, losses = zip(*used, strict=True)
            paper.iteration(gradients, float(np.mean(losses)))
            w = w - rate * torch.tensor(np.mean(gradients, axis=0))
            version, used = record.version, []
            opened_s[version], h[version] = record.now_s, record.k
            paper.choose()
    return paper.k


def count_of_updates(result):
    return range(result.history.totals.updates + 1)


@parametrize_few("seed", [0, 1, 2], keep=1)
@parametrize_few(
    ("protocol", "D", "beta"), [("dbw", 5, 1.01), ("dbw(D=1, beta=2, base=k_sync, pooled=false)", 1, 2.0)], keep=1
)
def test_every_k_equals_that_of_the_literal_algorithm(protocol, D, beta, seed):
    job, rate = tiny_job(optimizer=sgd(0.3), batch_size=4), 0.3
    cluster = pl.Cluster(N, pl.timing.ShiftedExponential(shift_s=0.3, mean_s=0.7))
    result = pl.train(job, protocol=protocol, cluster=cluster, stop="updates=40", seed=seed)
    ours, theirs = chosen(result), by_the_paper(result, job, seed, N, D, beta, rate)
    assert ours == theirs[: len(ours)]
    assert len(set(ours)) > 1, "a run that shows something"
