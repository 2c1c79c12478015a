"""CIFAR-100."""

from hbf.config import datasets

get_config = datasets.cifar100
