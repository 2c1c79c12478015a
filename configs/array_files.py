"""Your own images in a file: --config.data.root=FILE.npz with x_train, y_train, x_test and y_test."""

from hbf.config import datasets

get_config = datasets.array_files
