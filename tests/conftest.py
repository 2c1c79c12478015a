"""Eight virtual CPU devices for every test; must be set before jax starts."""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
