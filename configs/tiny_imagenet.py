"""Tiny ImageNet: 64×64 photographs, 200 classes, 100,000 + 10,000. Patches of 8 pixels, as in the memo."""

from ml_collections import ConfigDict

from configs.common import make_config


def get_config(arguments: str = '') -> ConfigDict:
  """Arguments: model, recipe and size, as in configs/common.py."""
  return make_config(arguments, {'name': 'tiny_imagenet'}, model={'patch': 8})
