"""Homogeneous transformers whose units are HyperBF."""

import os
import sys

__version__ = '0.2.0'

# Draws are then a function of their keys alone: the number of devices changes none, and a new transform leaves the
# keys of those before it as they are (`hbf.data.transforms`). JAX reads the variable when it is imported, which takes
# too long for `hbf --help`.
os.environ['JAX_THREEFRY_PARTITIONABLE'] = 'true'
if 'jax' in sys.modules:
  sys.modules['jax'].config.update('jax_threefry_partitionable', True)
