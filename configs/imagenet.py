"""ImageNet (ILSVRC 2012): photographs of many sizes, 1,000 classes, 1,281,167 + 50,000, as TFDS has prepared them.

Processes on the hosts decode the images, resize the shorter side to 224 pixels and cut the centre out; so evaluation
sees them. Training crops are cut out of these squares, and resized, inside the compiled step: never from what lies
beyond the centre, and never as sharp as from the stored image.
"""

from ml_collections import ConfigDict

from configs.common import make_config


def get_config(arguments: str = '') -> ConfigDict:
  """Arguments: model, recipe and size, as in configs/common.py; without a recipe `plain`, of size base."""
  return make_config(
    f'recipe=plain,{arguments}',
    # A core reads about 300 images a second, docs/speed.md: set as many processes as a host has cores to spare.
    {'name': 'imagenet2012', 'test_split': 'validation', 'image_size': 224, 'input': 'stream', 'workers': 16},
    model={'patch': 16},
  )
