"""Runs of ranks that share the samples, recorded as a balancer does, without ranks and clocks."""

import random
from unittest.mock import patch

import torch.distributed as dist

from paceline.policies.share_exchanges import updates_at_once
from paceline.policies.share_limits import ShareLimits
from paceline.policies.shares import Pieces, ShareBalancer
from paceline.recording.script_runs import SCRIPT
from paceline.recording.timed_updates import TimedUpdate
from paceline.shares.run_record import RunRecord
from paceline.shares.settings import BalanceSettings

RANKS, BATCH = 3, 16
FOUND = {"batch_size": BATCH, "parameters": 7, SCRIPT: {"model": "Net"}}


def record_in(folder, *, is_writer=True, **options):
    with patch.object(dist, "get_backend", lambda: "gloo"):
        settings = BalanceSettings(out=folder and str(folder), **options)
        return RunRecord(settings, FOUND, RANKS, 1, is_writer=is_writer)


def train(record, count, slow=2.0, seed=0, most=None, sample_s=0.01, lost=()):
    """Make updates as a balancer does: the times of an exchange are known when the next update ends."""
    policy, draws = ShareBalancer(RANKS, Pieces(BATCH)), random.Random(seed)
    ended_s, measured, exchanged, at_once = record._ended_s, [], [], 1
    living = [rank for rank in range(RANKS) if rank not in lost]
    for _ in range(count):
        factors = (1.0, 1.0, slow)
        shares = [BATCH * RANKS // len(living)] * RANKS if lost else policy.shares
        seconds = [sample_s * s * f * draws.uniform(0.98, 1.02) for s, f in zip(shares, factors, strict=True)]
        samples, seconds = [shares[rank] for rank in living], [seconds[rank] for rank in living]
        ended_s += max(seconds) + sample_s
        equal = samples if lost else [BATCH] * RANKS
        update = TimedUpdate(0.0, ended_s, living, samples, seconds, samples, equal)
        if lost:
            record.add(update)
            continue
        if exchanged:
            for each in exchanged:
                record.add(each)
            for each in exchanged[:-1]:
                policy.add(each.work, each.seconds)
            if most is not None and policy.limits.most != most:
                policy.limits = ShareLimits(most)
                record.limited(ended_s, policy.limits)
            if decision := policy.decide(exchanged[-1].work, exchanged[-1].seconds):
                record.decided(ended_s, decision)
            at_once, exchanged = updates_at_once([each.seconds for each in exchanged]), []
        measured.append(update)
        if len(measured) == at_once:
            exchanged, measured = measured, []
    for each in [*exchanged, *measured]:
        record.add(each)
