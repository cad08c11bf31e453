from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.clusters.local import LocalCluster
from paceline.clusters.parser import load_cluster, parse_cluster
from paceline.clusters.simulated import Cluster
from paceline.clusters.timing.distributions import Deterministic, Exponential, ShiftedExponential, Uniform
from paceline.clusters.timing.network import Network, ServerTime
from paceline.clusters.timing.slowdowns import Periodic, Slowdown, SlownessProfile, Transient
from paceline.errors import UsageError
from paceline.utils.rng import stream
from selections import parametrize_few

SHIFTED = ShiftedExponential(shift_s=0.3, mean_s=0.7)


def draws(cluster, worker, numbers, seed=0):
    trips = cluster.round_trips(seed)
    return [trips.duration_s(worker, draw, 0.0) for draw in numbers]


# -- draws


def test_a_draw_does_not_depend_on_earlier_draws():
    whole = draws(Cluster(4, SHIFTED), 3, range(1, 2001))
    assert len(set(whole)) == 2000
    scattered = [1999, 1, 700, 33, 32, 256, 257, 1, 2000, 64, 65]
    assert draws(Cluster(4, SHIFTED), 3, scattered) == [whole[draw - 1] for draw in scattered]


def test_a_draw_depends_on_seed_and_worker_and_not_on_the_other_workers():
    cluster = Cluster(2, SHIFTED)
    assert draws(cluster, 0, range(1, 9)) == draws(Cluster(200, SHIFTED), 0, range(1, 9))
    assert draws(cluster, 0, range(1, 9)) != draws(cluster, 1, range(1, 9))
    assert draws(cluster, 0, range(1, 9)) != draws(cluster, 0, range(1, 9), seed=1)


def test_draws_count_from_one():
    with pytest.raises(UsageError, match="draw=0 is not a whole number"):
        draws(Cluster(2), 0, [0])


def test_each_worker_has_its_distribution_and_its_speed():
    trips = Cluster(2, [Deterministic(1.0), Deterministic(6.0)], speed=[1, 3]).round_trips(0)
    assert [trips.duration_s(worker, 1, 0.0) for worker in (0, 1)] == [1.0, 2.0]


@pytest.mark.parametrize("slowdowns", [(), (Slowdown(at_s=2.0, factor=5.0, workers=1.0),)])
def test_the_round_trip_is_the_sum_of_its_parts(slowdowns):
    network = Network(latency_s=0.5, up_bytes_per_s=10, down_bytes_per_s=20)
    cluster = Cluster(1, Deterministic(1.0), slowdowns=slowdowns, network=network)
    trips = cluster.round_trips(0, payload_bytes=20)
    # Computing begins at 1.5 s, after the pull, and so is slowed down after half a second of work.
    compute_s = 0.5 + 0.5 * 5 if slowdowns else 1.0
    assert trips.times(0, 1, start_s=0.0) == (1.5, compute_s, 2.5)
    assert trips.duration_s(0, 1, start_s=0.0) == trips.times(0, 1, start_s=0.0).total_s == 4.0 + compute_s


# -- slowness over time


@pytest.mark.parametrize(
    ("start_s", "work_s", "duration_s"),
    [
        (0, 10, 10),  # ends at the boundary
        (8, 3, 2 + 1 * 5),  # crosses into the slow time
        (10, 2, 10),  # wholly slow
        (19, 1, 1 + 0.8 * 5 * 2),  # crosses from one slowdown into two
        (29, 1, 1 + 0.9 * 2),  # crosses out of both but one
        (0, 30, 10 + 10 + 10 + 17 * 2),  # 10 at once, 2 while 5 times, 1 while 10 times slower, the rest at 2
        (40, 0, 0),
    ],
)
def test_work_across_slowdown_boundaries_matches_hand_calculation(start_s, work_s, duration_s):
    timeline = SlownessProfile(
        [Slowdown(at_s=10, factor=5, workers=1.0, until_s=30), Slowdown(at_s=20, factor=2, workers=1.0)]
    )
    assert timeline.duration_s(work_s, start_s) == pytest.approx(duration_s, rel=1e-12)


amounts = st.floats(0, 100)


@settings(deadline=None)  # a busy machine is not a failure
@given(amounts, amounts, amounts)
def test_work_durations_are_additive(start_s, a_s, b_s):
    transient = Transient(mean_on_s=3, mean_off_s=9, slowdown=4)
    timeline = SlownessProfile(
        [Slowdown(at_s=20, factor=3, workers=1.0, until_s=50)], transient.periods(stream(0, "test"))
    )
    first_s = timeline.duration_s(a_s, start_s)
    second_s = timeline.duration_s(b_s, start_s + first_s)
    assert first_s + second_s == pytest.approx(timeline.duration_s(a_s + b_s, start_s), abs=1e-9)


def test_the_long_run_share_of_slow_time_follows_the_means():
    transient = Transient(mean_on_s=10, mean_off_s=30, slowdown=4)
    timeline = SlownessProfile([], transient.periods(stream(0, "test")))
    # While slow, one second of time is a quarter of work: time / work = 1 / (0.75 + 0.25 / 4).
    assert timeline.duration_s(100_000, 0) / 100_000 == pytest.approx(1 / (0.75 + 0.25 / 4), rel=0.02)


@given(
    on_s=st.floats(0.1, 50),
    off_s=st.floats(0.1, 50),
    slowdown=st.floats(0.2, 10),
    at_s=st.floats(0, 100),
    periods=st.integers(1, 50),
    begun_s=st.floats(0, 1),
)
@settings(deadline=None)  # a busy machine is not a failure
def test_work_of_whole_periods_matches_the_closed_form(on_s, off_s, slowdown, at_s, periods, begun_s):
    """Wherever in a period they begin, slow time or not."""
    every_s = on_s + off_s
    timeline = SlownessProfile([Periodic(on_s=on_s, every_s=every_s, slowdown=slowdown, at_s=at_s)])
    work_s = periods * (off_s + on_s / slowdown)
    start_s = at_s + begun_s * every_s
    assert timeline.duration_s(work_s, start_s) == pytest.approx(periods * every_s, rel=1e-9)


@parametrize_few(
    ("start_s", "work_s", "duration_s"),
    [
        (0, 5, 5),  # ends as the first slow period begins
        (0, 6, 5 + 4),  # crosses into it
        (5, 2, 8),  # wholly within it
        (14, 1, 1 + 0.75),  # crosses out of it
        (0, 5 + 2.5 + 10 + 1, 25 + 4),  # over a whole period into the next
        (1_000_000, 1, 1),  # far away: 5 + 20 i is where a slow period begins, and 15 + 20 i where it ends
        (1_000_005, 1, 4),
    ],
    keep=1,
)
def test_periodic_slowness_matches_hand_calculation(start_s, work_s, duration_s):
    timeline = SlownessProfile([Periodic(on_s=10, every_s=20, slowdown=4, at_s=5)])
    assert timeline.duration_s(work_s, start_s) == pytest.approx(duration_s, rel=1e-12)


def test_stragglers_with_offsets_are_slow_at_their_own_times():
    slowdowns = [
        Periodic(on_s=50, every_s=100, slowdown=5, workers=(0,)),
        Periodic(on_s=50, every_s=100, slowdown=5, workers=(1,), at_s=25),
    ]
    trips = Cluster(3, Deterministic(1.0), slowdowns=slowdowns).round_trips(0)
    found = {start_s: [trips.duration_s(worker, 1, start_s) for worker in range(3)] for start_s in (0, 30, 60, 80, 130)}
    assert found == {0: [5, 1, 1], 30: [5, 5, 1], 60: [1, 5, 1], 80: [1, 1, 1], 130: [5, 5, 1]}


def test_periodic_slowness_multiplies_with_other_slowdowns():
    timeline = SlownessProfile(
        [Periodic(on_s=10, every_s=20, slowdown=4), Slowdown(at_s=5, factor=3, workers=1.0, until_s=15)]
    )
    # Until 5 s 4 times, until 10 s 12 times, until 15 s 3 times, until 20 s not at all.
    assert timeline.duration_s(5 / 4 + 5 / 12 + 5 / 3 + 5, 0) == pytest.approx(20, rel=1e-12)


def test_transient_periods_begin_normal_and_depend_only_on_the_worker():
    cluster = Cluster(
        3, Deterministic(1.0), transient=Transient(mean_on_s=20, mean_off_s=10, slowdown=4, workers=[0, 1])
    )
    forth, back = cluster.round_trips(0), cluster.round_trips(0)
    asked = [(worker, start_s) for worker in range(3) for start_s in range(0, 100, 3)]
    found = {key: forth.duration_s(key[0], 1, key[1]) for key in asked}
    assert found == {key: back.duration_s(key[0], 1, key[1]) for key in reversed(asked)}
    rows = [[found[worker, start_s] for start_s in range(0, 100, 3)] for worker in range(3)]
    assert rows[0] != rows[1]
    assert set(rows[2]) == {1.0}
    assert max(rows[0]) == 4.0
    assert next(transient_periods := cluster.transient.periods(stream(0, "test")))[1] == 1.0
    assert next(transient_periods)[1] == 4.0


@pytest.mark.parametrize(
    ("workers", "n", "affected"),
    [(0.5, 16, 8), (0.5, 5, 3), (1.0, 7, 7), (0.01, 3, 1), (0.07, 100, 7), ((1, 4), 5, 2), ([1], 5, 1)],
)
def test_a_fraction_is_rounded_up_and_ids_are_taken_as_they_are(workers, n, affected):
    slowdown = Slowdown(at_s=160, factor=5, workers=workers)
    assert sum(slowdown.affects(worker, n) for worker in range(n)) == affected


# -- text and TOML

TOML = """
workers = 16
timing = "shifted_exp(shift=0.3, mean=0.7)"
speed = 2.0
[[slowdown]]
at_s = 160
factor = 5
workers = 0.5
[[slowdown]]
at_s = 10
until_s = 20.5
factor = 2
workers = [0, 3]
[[periodic]]
on_s = 20
every_s = 100
slowdown = 5
workers = [1]
[[periodic]]
on_s = 50
every_s = 100
slowdown = 5
workers = [2]
at_s = 25
[transient]
mean_on_s = 10
mean_off_s = 90
slowdown = 4
[network]
latency_s = 0.001
up_bytes_per_s = 1e9
[server]
update_s = 0.01
gradient_s = 0.001
"""
PYTHON = Cluster(
    16,
    SHIFTED,
    speed=2.0,
    slowdowns=[
        *(Slowdown(at_s=160, factor=5, workers=0.5), Slowdown(at_s=10, factor=2, workers=(0, 3), until_s=20.5)),
        *(
            Periodic(on_s=20, every_s=100, slowdown=5, workers=(1,)),
            Periodic(on_s=50, every_s=100, slowdown=5, workers=(2,), at_s=25),
        ),
    ],
    transient=Transient(mean_on_s=10, mean_off_s=90, slowdown=4),
    network=Network(latency_s=0.001, up_bytes_per_s=1e9, down_bytes_per_s=inf),
    server=ServerTime(0.01, 0.001),
)


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        return str(path)

    return write


def test_toml_and_python_give_the_same_cluster(write):
    assert load_cluster(write(TOML)) == parse_cluster(write(TOML)) == PYTHON
    assert load_cluster(write("workers = 2")) == Cluster(2)
    listed = 'workers = 2\ntiming = ["exp(mean=1)", "uniform(low=1, high=2)"]\nspeed = [1.0, 2.0]'
    assert load_cluster(write(listed)) == Cluster(2, [Exponential(1), Uniform(1, 2)], speed=[1.0, 2.0])


def test_toml_of_a_local_cluster(write):
    assert load_cluster(write("[local]\nworkers = 4")) == LocalCluster(4)
    text = """
[local]
workers = 2
device = "cuda"
respawn = true
threads = 3
[slowness]
timing = "exp(mean=2)"
[[slowness.slowdown]]
at_s = 1
factor = 2
workers = 1
"""
    assert load_cluster(write(text)) == LocalCluster(
        2,
        device="cuda",
        respawn=True,
        threads=3,
        slowness=Cluster(2, Exponential(2), slowdowns=[Slowdown(at_s=1, factor=2, workers=1)]),
    )


def test_typed_clusters():
    assert parse_cluster("16*shifted_exp(shift=0.3,mean=0.7)") == Cluster(16, SHIFTED)
    mixed = Cluster(3, [Exponential(1), Exponential(1), Exponential(5)])
    assert parse_cluster("2 * exp(mean=1) + 1 * exp(mean=5)") == mixed
    assert parse_cluster("local:4") == LocalCluster(4)


def test_cores_are_divided_among_the_workers():
    assert LocalCluster(10_000).worker_threads == 1
    assert LocalCluster(2, threads=3).worker_threads == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("local:0", "'0' in 'local:0' is not a number of workers"),
        ("local:x", "'x' in 'local:x' is not a number of workers"),
        ("0*exp(mean=1)", "'0' in '0*exp(mean=1)' is not a number of workers"),
        ("16", "'16' is not a group of workers: type 16*exp(mean=1)"),
        ("2*exp(mean=1) + exp(mean=2)", "'exp(mean=2)' is not a group of workers"),
        ("4*expo(mean=1)", "did you mean 'exp'"),
        ("4*exp(mean=1", "type the missing )"),
        ("nowhere.toml", "cannot read the cluster file nowhere.toml"),
    ],
)
def test_an_invalid_cluster_text_is_an_error_with_a_remedy(text, words):
    with pytest.raises(UsageError) as error:
        parse_cluster(text)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("workers = 2\nspeeed = 2", "cluster.toml, line 2: 'speeed' is not known; did you mean 'speed'?"),
        (
            "# latancy_s = 1\nworkers = 2\n\n[network]\nlatancy_s = 1",
            "line 5: 'latancy_s' is not known; did you",
        ),
        ("workers = 2\nnetwork = {latancy_s = 1}", "line 2: 'latancy_s' is not known"),
        ("workers = 2\n[netwrk]\nlatency_s = 1", "line 2: 'netwrk' is not known; did you mean 'network'?"),
        (
            "workers = 2\n[[slowdown]]\nat_s = 1\nfactor = 2\nworkers = 1\n[[slowdown]]\nfacto = 1",
            "line 7: 'facto'",
        ),
        ("[local]\nworkers = 2\ndevise = 'cpu'", "line 3: 'devise' is not known; did you mean 'device'?"),
        ("[local]\nworkers = 2\n[slowness]\nworkers = 2", "line 4: 'workers' is not known"),
        ("[local]\nworkers = 2\n[slowness.network]\nlatency = 2", "line 4: 'latency'"),
        ("workers = 2\nspeed = = 2", "line 2"),
        ("speed = 2", "add for example workers = 16"),
        ("[local]\nthreads = 2", "add for example workers = 4 under [local]"),
        ("workers = 0", "n=0 is not a whole number in [1, inf)"),
        ("workers = 2.5", "n=2.5, expected a whole number"),
        ("workers = 2\ntiming = 3", 'timing=3 is not text: type for example timing = "exp(mean=1)"'),
        (
            "workers = 2\ntiming = ['exp(mean=1)']",
            "timing lists 1 value for 2 workers: give one for all, or 2",
        ),
        ("workers = 2\nspeed = [1, 0]", "speed=0 is not a number in (0, inf)"),
        ("workers = 2\nnetwork = 3", "network is not a table: type [network]"),
        ("workers = 2\n[slowdown]\nat_s = 1", "type [[slowdown]]"),
        ("workers = 2\n[periodic]\non_s = 1", "type [[periodic]]"),
        ("workers = 2\n[[periodic]]\non_s = 1", "periodic needs every_s, slowdown"),
        ("workers = 2\n[[periodic]]\non_s = 1\nevery = 5", "line 4: 'every' is not known; did you mean 'every_s'?"),
        ("workers = 2\n[[slowdown]]\nat_s = 1", "slowdown needs factor, workers"),
        ("workers = 2\n[transient]\nmean_on_s = 1", "transient needs mean_off_s, slowdown"),
        (
            "workers = 2\n[[slowdown]]\nat_s = 1\nfactor = 2\nworkers = [2]",
            "workers=2 is not a whole number in [0, 2)",
        ),
        ("local = 3", "local is not a table: type [local]"),
        ("[local]\nworkers = 2\ndevice = 'gpu'", "device='gpu' is not known"),
        ("[local]\nworkers = 2\nrespawn = 1", "respawn=1, expected true or false"),
        ("[local]\nworkers = 2\nthreads = 0", "threads=0 is not a whole number"),
    ],
)
def test_an_invalid_cluster_file_is_a_one_line_error_with_its_name(write, text, words):
    with pytest.raises(UsageError) as error:
        load_cluster(write(text))
    assert words in str(error.value)
    assert "cluster.toml" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: Cluster(2, timing=1.0),
            "timing=1.0, expected a pl.timing.Distribution, a list of pl.timing.Distribution or a pl.timing.Trace",
        ),
        (lambda: Cluster(2).round_trips(0, payload_bytes=-1), "payload_bytes=-1"),
        (
            lambda: LocalCluster(2, slowness=Cluster(3)),
            "slowness has 3 workers, the cluster 2: give 2 in both",
        ),
        (lambda: Network(up_bytes_per_s=0), "up_bytes_per_s=0 is not a number in (0, inf]"),
        (lambda: Network(latency_s=inf), "latency_s=inf is not a number in [0, inf)"),
        (lambda: ServerTime(update_s=-1), "update_s=-1 is not a number in [0, inf)"),
        (lambda: Slowdown(at_s=-1, factor=2, workers=1.0), "at_s=-1"),
        (lambda: Slowdown(at_s=1, factor=0, workers=1.0), "factor=0"),
        (lambda: Slowdown(at_s=5, factor=2, workers=1.0, until_s=5), "until_s=5 is not a number in (5, inf]"),
        (
            lambda: Slowdown(at_s=5, factor=2, workers=3),
            "workers=3 is not a number in (0, 1]; or give a list of worker ids",
        ),
        (lambda: Slowdown(at_s=5, factor=2, workers=[-1]), "workers=-1 is not a whole number in [0, inf)"),
        (lambda: Transient(mean_on_s=0, mean_off_s=1, slowdown=2), "mean_on_s=0"),
        (lambda: Periodic(on_s=0, every_s=1, slowdown=2), "on_s=0"),
        (lambda: Periodic(on_s=100, every_s=100, slowdown=2), "every_s=100 is not a number in (100, inf)"),
        (lambda: Periodic(on_s=20, every_s=100, slowdown=0), "slowdown=0"),
        (lambda: Periodic(on_s=20, every_s=100, slowdown=5, at_s=-1), "at_s=-1"),
        (lambda: Periodic(on_s=20, every_s=100, slowdown=5, workers=2), "workers=2"),
        (lambda: Transient(mean_on_s=1, mean_off_s=1, slowdown=2, workers="all"), "workers='all'"),
    ],
)
def test_invalid_arguments_are_errors_with_a_remedy(build, words):
    with pytest.raises(UsageError) as error:
        build()
    assert words in str(error.value)
