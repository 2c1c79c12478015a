"""Tiny Shakespeare: a million characters of his plays, the last tenth to test on, as in nanoGPT."""

from ml_collections import ConfigDict

from configs.common import make_text_config


def get_config(arguments: str = '') -> ConfigDict:
  """Arguments: model, recipe and size, as in configs/common.py."""
  return make_text_config(arguments, {'name': 'tiny_shakespeare', 'test_split': 'validation+test'})
