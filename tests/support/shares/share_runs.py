"""Runs of ranks that share the samples, recorded as a balancer does, without ranks and clocks."""

import random
from unittest.mock import patch

import torch.distributed as dist

from paceline.policies.share_exchanges import updates_at_once
from paceline.policies.share_limits import ShareLimits
from paceline.policies.shares import Pieces, ShareBalancer, even
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
    equal = even(RANKS * BATCH, [rank not in lost for rank in range(RANKS)])
    sizes = Pieces(BATCH, record._settings.pieces, record._settings.max_share)
    policy, draws = ShareBalancer(RANKS, sizes, equal), random.Random(seed)
    ended_s, measured, exchanged, at_once = record._ended_s, [], [], 1
    living = [rank for rank in range(RANKS) if rank not in lost]
    for _ in range(count):
        shares = policy.shares
        seconds = [sample_s * s * f * draws.uniform(0.98, 1.02) for s, f in zip(shares, (1.0, 1.0, slow), strict=True)]
        ended_s += max(seconds) + sample_s
        update = TimedUpdate(
            began_s=0.0,
            ended_s=ended_s,
            ranks=living,
            samples=[shares[rank] for rank in living],
            seconds=[seconds[rank] for rank in living],
            work=[shares[rank] for rank in living],
            equal_work=[equal[rank] for rank in living],
        )
        measured.append((update, shares, seconds))
        if exchanged:
            for update, *_ in exchanged:
                record.add(update)
            for _, *times in exchanged[:-1]:
                policy.add(*times)
            if most is not None and policy.limits.most != most:
                policy.limits = ShareLimits(most)
                record.limited(ended_s, policy.limits)
            _, *times = exchanged[-1]
            if decision := policy.decide(*times):
                record.decided(ended_s, decision)
            at_once, exchanged = updates_at_once([times for *_, times in exchanged]), []
        if len(measured) == at_once:
            exchanged, measured = measured, []
    for update, *_ in [*exchanged, *measured]:
        record.add(update)
