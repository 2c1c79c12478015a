"""CIFAR-10."""

from hbf.config import datasets

get_config = datasets.cifar10
