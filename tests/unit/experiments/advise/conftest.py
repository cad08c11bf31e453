import pytest

from paceline.experiments.advise import local_steps_prediction, recorded_ddp


@pytest.fixture(scope="module")
def few_trips():
    """Predict local steps, whose times few tests here compare, from a few trips of each worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_steps_prediction, "MINIBATCHES", 16)
        patch.setattr(local_steps_prediction, "LEAST_TRIPS", 2)
        yield


@pytest.fixture(scope="module")
def short_predictions(few_trips):
    """Predict few numbers of local steps, and short runs: the tests compare other values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_steps_prediction, "MOST_H", 16)
        patch.setattr(recorded_ddp, "LEAST_UPDATES", 60)
        yield
