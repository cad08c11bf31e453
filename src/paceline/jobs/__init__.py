"""Built-in jobs and models, and the loading of a job by name."""

from paceline.jobs.cifar import cifar10, cifar100
from paceline.jobs.digits import digits
from paceline.jobs.job import BATCH_NORMS
from paceline.jobs.lr_options import scheduled
from paceline.jobs.metrics import Average
from paceline.jobs.mnist import mnist
from paceline.jobs.models.resnet import ResNet, resnet18, resnet20, resnet32, resnet50, resnet101, resnet152
from paceline.jobs.models.small import DBWNet, SmallNet, SoftmaxRegression
from paceline.jobs.models.vgg import VGG, vgg16
from paceline.jobs.registry import JobLoadError, load_job

__all__ = [
    "BATCH_NORMS",
    "VGG",
    "Average",
    "DBWNet",
    "JobLoadError",
    "ResNet",
    "SmallNet",
    "SoftmaxRegression",
    "cifar10",
    "cifar100",
    "digits",
    "load_job",
    "mnist",
    "resnet18",
    "resnet20",
    "resnet32",
    "resnet50",
    "resnet101",
    "resnet152",
    "scheduled",
    "vgg16",
]
