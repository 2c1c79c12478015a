"""One's own text: a file, or a folder whose files are one text; --config.data.root=PATH. The last tenth tests."""

from ml_collections import ConfigDict

from configs.common import make_text_config


def get_config(arguments: str = '') -> ConfigDict:
  """Arguments: model, recipe and size, as in configs/common.py."""
  return make_text_config(arguments, {'name': 'text_file'})
