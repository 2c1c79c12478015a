"""Your own images in memory."""

from hbf.config import datasets

get_config = datasets.arrays
