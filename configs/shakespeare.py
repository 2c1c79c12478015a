"""Tiny Shakespeare."""

from hbf.config import datasets

get_config = datasets.shakespeare
