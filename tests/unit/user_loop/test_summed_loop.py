"""Attached loops without a server, as threads: each rank steps a copy of its optimizer with the sum of what counts."""

import pytest
import torch

import paceline as pl
from attached_threads import AttachedThreads
from loop_parts import BATCH, SAMPLES, adamw, loss_of, make_parts, of_the_mean_gradient, sgd, step, train
from paceline.core.records import WorkerJoined, WorkerLost
from selections import parametrize_each_once, parametrize_few

EXACT = 1e-12


def attached(count, parts, protocol, **settings):
    return AttachedThreads(count, parts, protocol, server=False, **settings)


def assert_all_have_the_same_bits(ranks):
    first, *others = [list(model.state_dict().values()) for model, _, _ in ranks.parts]
    for other in others:
        assert all(map(torch.equal, first, other))


@parametrize_each_once(make_optimizer=[sgd, adamw], accumulate__clip_norm=[(1, 0.01), (2, None)])
def test_bsp_steps_by_the_mean_gradient(make_optimizer, accumulate, clip_norm, network, data):
    parts = make_parts(network, data, make_optimizer, batch_size=BATCH // accumulate)
    ranks = attached(3, parts, "bsp", accumulate=accumulate, clip_norm=clip_norm)
    steps = ranks.run(train(accumulate=accumulate))
    expected = of_the_mean_gradient(network, make_optimizer, steps, clip_norm)
    for ours, theirs in zip(ranks.parts[0][0].parameters(), expected, strict=True):
        assert (ours - theirs).abs().max() < EXACT
    assert_all_have_the_same_bits(ranks)


@parametrize_few("protocol", ["k_sync(k=2)", "pull(k=5)", "k_batch_sync(k=5)", "backup(k=2)", "dbw"], keep=1)
def test_every_rank_has_the_last_version_and_the_replay_makes_the_same_decisions(protocol, network, data, tmp_path):
    ranks = attached(3, make_parts(network, data), protocol, out=tmp_path / "run")
    assert not [each for each in ranks.run(train(epochs=3)) if isinstance(each, BaseException)]
    assert_all_have_the_same_bits(ranks)
    assert ranks.server.result.stopped_by == "epochs"
    assert pl.replay(tmp_path / "run").is_same


def test_each_rank_steps_with_the_options_of_the_loops(network, data):
    taken = []

    def loop(run, model, optimizer):
        for _ in run.epochs(1):
            for batch in run.loader:
                for group in optimizer.param_groups:
                    group.update(lr=0.01 + 0.001 * run.update, weight_decay=0.1 * run.update)
                step(model, optimizer, [batch])
                if model is ranks.parts[0][0]:
                    taken.append(run.update)
        return optimizer.param_groups[0]["lr"]

    ranks = attached(2, make_parts(network, data, adamw), "bsp")
    assert ranks.run(loop) == [pytest.approx(0.01 + 0.001 * (SAMPLES // BATCH // 2 - 1))] * 2
    served = AttachedThreads(2, make_parts(network, data, adamw), "bsp")
    ranks, without = served, ranks
    assert served.run(loop)
    for ours, theirs in zip(without.parts[0][0].parameters(), served.parts[0][0].parameters(), strict=True):
        assert (ours - theirs).abs().max() < EXACT


def test_each_rank_has_the_state_of_the_optimizer_during_the_run_and_after_it(network, data):
    def loop(run, model, optimizer):
        for _ in run.epochs(1):
            for batch in run.loader:
                step(model, optimizer, [batch])
                states.append((run.update, count(optimizer)))
        return optimizer.state_dict()["state"]

    def count(optimizer):
        return max(each["step"].item() for each in optimizer.state_dict()["state"].values())

    states = []
    ranks = attached(2, make_parts(network, data, adamw), "bsp")
    first, second = ranks.run(loop)
    for parameter, state in first.items():
        assert all(torch.equal(value, second[parameter][name]) for name, value in state.items())
    assert all(steps in {update, update + 1} for update, steps in states)
    for model, optimizer, _ in ranks.parts:
        assert len(optimizer.state_dict()["state"]) == len(first)
        loss_of(model, *next(iter(ranks.parts[0][2]))).backward()
        optimizer.step()
        assert count(optimizer) == SAMPLES // BATCH // 2 + 1


def test_a_loop_that_breaks_off_leaves_the_run_to_the_others(network, data):
    def loop(run, model, optimizer):
        if len(first) < 1 and not first.append(run):
            for _ in run.epochs(2):
                step(model, optimizer, [next(iter(run.loader))])
                break
        else:
            train()(run, model, optimizer)

    first = []
    ranks = attached(3, make_parts(network, data), "bsp")
    assert not [each for each in ranks.run(loop) if isinstance(each, BaseException)]
    assert ranks.server.result.stopped_by == "epochs"
    assert [each.reason for each in ranks.server.result.history.of(WorkerLost)] == ["the end of its loop"]


def test_the_others_go_on_while_a_loop_pauses(network, data):
    def loop(run, model, optimizer):
        for _ in run.epochs(4):
            for batch in run.loader:
                step(model, optimizer, [batch])
                if model is ranks.parts[1][0] and not pauses:
                    with run.pause():
                        pauses.append(run.update)
                        until = ranks.parts[0][0].progress + 3
                        while ranks.parts[0][0].progress < until:
                            pass
                model.progress = run.update

    pauses = []
    ranks = attached(2, make_parts(network, data), "bsp")
    for model, _, _ in ranks.parts:
        model.progress = 0
    assert ranks.run(loop) == [None, None]
    assert pauses
    assert [each.worker for each in ranks.server.result.history.of(WorkerJoined)] == [1]
    assert_all_have_the_same_bits(ranks)


def test_a_stop_at_rank_0_is_a_normal_end_of_every_loop(network, data):
    def loop(run, model, optimizer):
        for _ in run.epochs(100):
            for batch in run.loader:
                step(model, optimizer, [batch])
                if model is ranks.parts[0][0] and run.update == 5:
                    run.stop()
        return run.stopped_by

    ranks = attached(2, make_parts(network, data), "bsp")
    assert ranks.run(loop) == ["stopped", "stopped"]
    assert_all_have_the_same_bits(ranks)


def test_a_run_is_resumed_with_a_server_or_without(network, data, tmp_path):
    ends = []
    for number, (first, then) in enumerate([(True, True), (False, False), (True, False), (False, True)]):
        parts, folder = make_parts(network, data, adamw), tmp_path / str(number)
        AttachedThreads(2, parts, "bsp", server=first, stop="updates=4", out=folder).run(train(epochs=9))
        again = AttachedThreads(2, parts, "bsp", server=then, stop="updates=9", resume=folder)
        assert not [each for each in again.run(train(epochs=9)) if isinstance(each, BaseException)]
        ends.append(list(again.parts[0][0].parameters()))
    for parameters in zip(*ends, strict=True):
        assert all((each - parameters[0]).abs().max() < EXACT for each in parameters)


@pytest.mark.parametrize("protocol", ["asp", "auto", "bsp + local_steps(H=4)"])
def test_what_needs_a_server_is_refused_with_what_does_not(protocol, network, data, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    parts = make_parts(network, data)()
    with pytest.raises(pl.UsageError, match="server=False"):
        pl.attach(*parts, protocol=protocol, cluster="torchrun(server=false)", stop="updates=2")
