from math import inf, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from paceline.clusters.timing.distributions import (
    Deterministic,
    Empirical,
    Exponential,
    Gamma,
    HyperExponential,
    LogNormal,
    Pareto,
    ShiftedExponential,
    Uniform,
    parse_distribution,
)
from paceline.errors import UsageError
from paceline.utils.rng import derived_seed, stream

# law, as typed, the same law in SciPy
TABLE = [
    (Deterministic(2.0), "deterministic(value=2.0)", None),
    (Uniform(1.0, 3.0), "uniform(low=1, high=3)", stats.uniform(1, 2)),
    (Exponential(2.0), "exp(mean=2)", stats.expon(scale=2)),
    (ShiftedExponential(0.3, 0.7), "shifted_exp(shift=0.3, mean=0.7)", stats.expon(0.3, 0.7)),
    (Pareto(2.0, 3.0), "pareto(scale=2, shape=3)", stats.pareto(3, scale=2)),
    (LogNormal(2.0, 0.5), "lognormal(median=2, sigma=0.5)", stats.lognorm(0.5, scale=2)),
    (Gamma(0.5, 2.0), "gamma(shape=0.5, mean=2)", stats.gamma(0.5, scale=4)),
    (Gamma(4.0, 2.0), "gamma(shape=4, mean_s=2)", stats.gamma(4, scale=0.5)),
    (
        HyperExponential((1.0, 10.0), (0.9, 0.1)),
        "hyper_exp(means=[1, 10], probabilities=[0.9, 0.1])",
        None,
    ),
    (Empirical((3.0, 1.0, 2.0)), None, None),
]
every_law = pytest.mark.parametrize("law", [law for law, _, _ in TABLE], ids=repr)
probabilities = st.floats(0, 1, exclude_max=True)


@every_law
@settings(deadline=None)  # a busy machine is not a failure
@given(st.lists(probabilities, min_size=2))
def test_the_quantile_function_is_increasing_and_positive(law, us):
    times_s = law.quantile(np.sort(us))
    assert np.isfinite(times_s).all()
    assert (times_s >= 0).all()
    rounding_s = 1e-12 * (times_s[1:] + law.expectation_s)
    assert (np.diff(times_s) >= -rounding_s).all()


@pytest.mark.parametrize(
    ("law", "scipy_law"), [pytest.param(law, other, id=repr(law)) for law, _, other in TABLE if other]
)
def test_the_quantile_function_equals_that_of_scipy(law, scipy_law):
    u = np.linspace(0, 1, 1000, endpoint=False)
    np.testing.assert_allclose(law.quantile(u), scipy_law.ppf(u), rtol=1e-12)


@every_law
def test_mean_of_the_quantile_is_the_expectation(law):
    midpoints = (np.arange(200_000) + 0.5) / 200_000
    assert law.quantile(midpoints).mean() == pytest.approx(law.expectation_s, rel=1e-3)


@pytest.mark.parametrize(("law", "text"), [(law, text) for law, text, _ in TABLE if text])
def test_a_distribution_given_as_text_equals_the_python_one(law, text):
    assert parse_distribution(text) == law


@settings(deadline=None)  # a busy machine is not a failure
@given(
    st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(0.01, 1)), min_size=1, max_size=5),
    st.lists(probabilities, min_size=1),
)
def test_the_hyperexponential_cdf_inverts_its_quantile(branches, us):
    means_s, weights = (np.array(column) for column in zip(*branches, strict=True))
    shares = weights / weights.sum()
    x = HyperExponential(tuple(means_s), tuple(shares)).quantile(np.array(us))
    cdf = 1 - np.exp(-x[:, None] / means_s) @ shares
    np.testing.assert_allclose(cdf, us, atol=1e-9)


def test_a_pareto_tail_of_one_or_less_has_no_finite_mean():
    assert Pareto(scale_s=2.0, shape=1.0).expectation_s == inf


def test_a_hyperexponential_with_one_branch_is_exponential():
    u = np.array([0.0, 0.5, 0.999])
    np.testing.assert_allclose(HyperExponential((2.0,), (1.0,)).quantile(u), Exponential(2.0).quantile(u))
    assert Exponential(2.0).quantile(np.array([0.5]))[0] == pytest.approx(2 * log(2))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("exp(mean=0)", "exp: mean=0 is not a number in (0, inf)"),
        ("exp(mean=-1.5)", "exp: mean=-1.5 is not a number in (0, inf)"),
        ("exp(mean=nan)", "exp: mean=nan is not a number in (0, inf)"),
        ("exp(mean=inf)", "exp: mean=inf is not a number in (0, inf)"),
        ("exp(mean=slow)", "mean='slow', expected a number"),
        ("exp(mean=true)", "mean=True, expected a number"),
        ("deterministic(value=0)", "deterministic: value=0"),
        ("uniform(low=-1, high=2)", "uniform: low=-1 is not a number in [0, inf)"),
        ("uniform(low=2, high=2)", "uniform: high=2 is not a number in (2, inf)"),
        ("shifted_exp(shift=-0.1, mean=1)", "shifted_exp: shift=-0.1"),
        ("pareto(scale=1, shape=0)", "shape=0"),
        ("lognormal(median=1, sigma=0)", "sigma=0"),
        ("gamma(shape=0, mean=1)", "shape=0"),
        ("hyper_exp(means=[1, 0], probabilities=[0.5, 0.5])", "hyper_exp: means=0"),
        ("hyper_exp(means=[1, 2], probabilities=[0, 1])", "probabilities=0"),
        ("hyper_exp(means=[1, 2], probabilities=[0.5, 0.4])", "2 numbers with sum 1"),
        ("hyper_exp(means=[1, 2], probabilities=[1.0])", "2 numbers with sum 1"),
        ("hyper_exp(means=1, probabilities=[1])", "means=1, expected a list of numbers"),
        (
            "hyper_exp(means=[], probabilities=[])",
            "means=[] is not a list of at least one number: type for example means=[1.0, 2.0]",
        ),
        ("expo(mean=1)", "'expo' is not known; did you mean 'exp'?"),
        ("exp(man=1)", "exp has no knob 'man'; did you mean 'mean_s'?"),
    ],
)
def test_invalid_parameters_are_errors_with_a_remedy(text, words):
    with pytest.raises(UsageError) as error:
        parse_distribution(text)
    assert words in str(error.value)


def test_measured_times_are_read_from_a_column(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("worker,compute_s\n0,3.0\n1,1.5\n")
    law = parse_distribution(f"empirical(path='{path}', column=compute_s)")
    assert law == Empirical((1.5, 3.0))
    np.testing.assert_array_equal(law.quantile(np.array([[0.0, 0.49], [0.5, 0.99]])), [[1.5, 1.5], [3, 3]])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read the measured times"),
        (b"\xff\xfe", "cannot read the measured times"),
        (b"", "no column 'compute_s'"),
        (b"compute,push_s\n1,2\n", "no column 'compute_s'; did you mean 'compute'?"),
        (b"compute_s\n1.0\nfast\n", "trace.csv, line 3: 'fast' is not a number of seconds"),
        (b"worker,compute_s\n0\n", "line 2: None is not a number"),
        (b"compute_s\n1.0\n-2\n", "line 3: '-2' is not a number of seconds in (0, inf)"),
        (b"compute_s\n", "values_s=() is not a list of at least one number"),
    ],
)
def test_an_invalid_trace_is_an_error_with_a_remedy(tmp_path, content, words):
    path = tmp_path / "trace.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        Empirical.from_csv(path, "compute_s")
    assert words in str(error.value)


def test_random_streams_differ_if_any_part_of_their_name_differs():
    names = [(0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2), (0, "a"), (0, "a", 1, 0)]
    assert len({stream(*name).random() for name in names}) == len(names)
    assert len({derived_seed(*name) for name in names}) == len(names)
    assert all(0 <= derived_seed(*name) < 2**63 for name in names)


def test_a_random_stream_is_stable_and_accepts_numpy_integers():
    assert derived_seed(np.int64(5), "dropout", np.int32(2)) == derived_seed(5, "dropout", 2)
    assert stream(0, "compute time", 0).random() == 0.9036988226940623
