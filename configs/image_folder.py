"""Your own images: --config.data.root=DIR with DIR/train/CLASS/* and DIR/test/CLASS/*."""

from hbf.config import datasets

get_config = datasets.image_folder
