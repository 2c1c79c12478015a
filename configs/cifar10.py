"""CIFAR-10: 32×32 photographs, 10 classes, 50,000 + 10,000."""

from ml_collections import ConfigDict

from configs.common import make_config


def get_config(arguments: str = '') -> ConfigDict:
  """Arguments: model, recipe and size, as in configs/common.py."""
  return make_config(arguments, {'name': 'cifar10'})
