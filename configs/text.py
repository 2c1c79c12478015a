"""The reference of Python, half a million characters that come with it: a text to try without a file or a network."""

from ml_collections import ConfigDict

from configs.common import make_text_config


def get_config(arguments: str = '') -> ConfigDict:
  """Arguments: model, recipe and size, as in configs/common.py."""
  return make_text_config(arguments, {'name': 'python'})
