"""Tiny ImageNet."""

from hbf.config import datasets

get_config = datasets.tiny_imagenet
