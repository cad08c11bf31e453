import json

import pytest

import paceline as pl
from paceline.catalogue.parser import parse_plan
from paceline.protocols.protocol import as_plan
from paceline.run.plan_json import plan_as_json, plan_of
from tiny_controllers import RandomWalk

TYPED = [
    "bsp",
    "auto(candidates=['bsp', 'k_sync(k=2)'], price_of_switch_s=2)",
    "dssp(lead=1, most=3)@updates=9 >> asp",
    "balanced(m=4, leases=1, max_share=2)@updates=9 >> asp",
    "balanced(m=4, backups=false, batch=live)",
    "ssp(lead=2)@25% >> asp@seconds=60 >> bsp",
    "dbw(D=3)@updates=9 >> b_dbw(release_idle=true)",
    "adasync(base=k_batch_async, K_0=2)",
    "patient(base=backup)@updates=9 >> patient",
    "bsp + greedy(window=1)@epochs=2 >> bsp + elastic@epochs=3 >> asp + stragglers",
    "asp + staleness_lr(C=0.01) + momentum(rule='i/n')",
    "asp + staleness_weight(weighting='1/sqrt(1+tau)')",
    "asp + dc_asgd(lambda0=2.0, m=0.95)",
    "dc_s3gd(lambda0=0.1)",
    "local_sgd(H=4)",
    "k_sync(k=3) + grace(seconds=0.5)",
    "asp + restart_after(seconds=2.5)",
    "asp + local_steps(H=3, outer='delayed_nesterov(lr=0.7, momentum=0.9, every=4)')",
    "bsp + local_steps(H=3)@25% >> asp + local_steps(H=3)",
    "k_sync(k=3) + local_steps(H=9, seconds=2.5, outer='nesterov(lr=0.5, momentum=0.8)')",
    "local_sgd(H=4, outer='nesterov(lr=0.5, momentum=0.8)')",
    "local_sgd(H=4, lag=2, fragments=2)",
]


@pytest.mark.parametrize("text", TYPED)
def test_a_plan_is_saved_as_data(text):
    plan = parse_plan(text)
    saved = json.loads(json.dumps(plan_as_json(plan), allow_nan=False))
    assert plan_of(saved).in_full == plan.in_full
    assert str(plan_of(saved)) == str(plan)


def test_a_scheduled_quorum_is_saved_as_data():
    plan = as_plan(pl.k_sync(k=2).controlled_by(pl.controllers.ScheduledQuorum({0: 2, 9: 4})))
    saved = json.loads(json.dumps(plan_as_json(plan)))
    assert plan_of(saved).in_full == plan.in_full


@pytest.mark.parametrize(
    ("part", "name"),
    [(RandomWalk(3, 4), "RandomWalk"), (pl.controllers.QuorumFunction(lambda observation: 2), "QuorumFunction")],
)
def test_a_user_defined_controller_is_saved_by_name_only(part, name):
    saved = plan_as_json(as_plan(pl.k_async(k=2).controlled_by(part)))
    assert saved[0]["controllers"][0]["name"] == name
    with pytest.raises(pl.UsageError, match=rf"part that cannot be made from run.json \({name}\)"):
        plan_of(saved)


def test_a_user_defined_weighting_is_saved_by_name_only():
    plan = as_plan(pl.asp() + pl.staleness_weight(lambda tau: 1.0 if tau == 0 else 0.5))
    with pytest.raises(pl.UsageError, match=r"cannot be made from run.json \(staleness_weight\)"):
        plan_of(plan_as_json(plan))
