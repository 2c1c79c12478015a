"""Python's own reference: a text for first trials, without a file or a download."""

from hbf.config import datasets

get_config = datasets.text
