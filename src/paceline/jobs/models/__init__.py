"""Models of the papers, and two small models."""

from paceline.jobs.models.resnet import ResNet, resnet18, resnet20, resnet32, resnet50, resnet101, resnet152
from paceline.jobs.models.small import DBWNet, SmallNet, SoftmaxRegression
from paceline.jobs.models.vgg import VGG, vgg16

__all__ = [
    "VGG",
    "DBWNet",
    "ResNet",
    "SmallNet",
    "SoftmaxRegression",
    "resnet18",
    "resnet20",
    "resnet32",
    "resnet50",
    "resnet101",
    "resnet152",
    "vgg16",
]
