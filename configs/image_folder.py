"""Your own images: --config.data.root=DIR with DIR/train/CLASS/* and DIR/test/CLASS/*."""

from ml_collections import ConfigDict

from configs.common import make_config


def get_config(arguments: str = '') -> ConfigDict:
  """Arguments: model, recipe and size, as in configs/common.py."""
  data = {'name': 'image_folder', 'image_size': 64, 'validation': 0.1, 'stratify': True}
  return make_config(arguments, data, model={'patch': 8})
