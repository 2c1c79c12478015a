"""Homogeneous transformers whose units are HyperBF."""

import jax

# Draws are then a function of their keys alone: the number of devices changes none, and a new transform leaves the
# keys of those before it as they are (`hbf.data.transforms`). JAX lets the environment turn it off.
jax.config.update('jax_threefry_partitionable', True)
