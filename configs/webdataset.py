"""Your own images in tar files: --config.data.root=DIR with DIR/train-*.tar and DIR/test-*.tar."""

from hbf.config import datasets

get_config = datasets.webdataset
