"""The models that the papers train, and two small ones for a first look."""

from paceline.jobs.models.resnet import ResNet, resnet18, resnet20, resnet32, resnet50
from paceline.jobs.models.small import DBWNet, SmallNet, SoftmaxRegression

__all__ = ["DBWNet", "ResNet", "SmallNet", "SoftmaxRegression", "resnet18", "resnet20", "resnet32", "resnet50"]
