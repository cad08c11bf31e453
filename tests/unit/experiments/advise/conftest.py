import pytest

from paceline.experiments.advise import local_steps_prediction


@pytest.fixture(scope="module")
def few_trips():
    """Predict local steps, whose times few tests here compare, from a few trips of each worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_steps_prediction, "MINIBATCHES", 16)
        patch.setattr(local_steps_prediction, "LEAST_TRIPS", 2)
        yield
