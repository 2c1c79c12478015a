"""Handwritten digits that ship with scikit-learn: 8×8 grey images, 10 classes, 1,797. The default; no network."""

from ml_collections import ConfigDict

from configs.common import make_config


def get_config(arguments: str = '') -> ConfigDict:
  """Arguments: model, recipe and size, as in configs/common.py."""
  return make_config(
    arguments,
    # Mirrored digits are no digits.
    {'name': 'digits', 'transforms': (('shift', 1),), 'validation': 0.1},
    model={'patch': 4},
    train={'epochs': 80.0, 'batch_size': 64, 'steps_per_call': 10},  # steps take milliseconds, even on a CPU
    evaluate={'every': '10epochs'},
    checkpoint={'every': '10epochs'},
  )
