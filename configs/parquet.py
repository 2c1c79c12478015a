"""Your own images in Parquet files: --config.data.root=DIR with DIR/train-*.parquet and DIR/test-*.parquet."""

from hbf.config import datasets

get_config = datasets.parquet
