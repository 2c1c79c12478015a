"""Handwritten digits that come with scikit-learn, the default: no network is needed."""

from hbf.config import datasets

get_config = datasets.digits
