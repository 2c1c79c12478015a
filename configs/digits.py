"""Handwritten digits that come with scikit-learn, the default: nothing is downloaded."""

from hbf.config import datasets

get_config = datasets.digits
