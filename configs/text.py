"""Python's own reference: a text to try without a file or a network."""

from hbf.config import datasets

get_config = datasets.text
