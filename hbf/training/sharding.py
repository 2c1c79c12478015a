"""Where arrays lie. One axis today, 'data': batches are split over it, parameters are on every device.

Computation never names devices: another layout (parameters split too) is another answer of `state_sharding`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hbf.errors import UserError


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
  """Devices in one row."""
  return Mesh(np.asarray(devices), ('data',))


def replicated(mesh: Mesh) -> NamedSharding:
  """For arrays that every device holds."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """For arrays whose first axis is the batch."""
  return NamedSharding(mesh, PartitionSpec('data'))


def state_sharding(mesh: Mesh, state: Any) -> Any:
  """A sharding for every leaf of a training state (or its shapes)."""
  return jax.tree.map(lambda _: replicated(mesh), state)


def check_batch_size(what: str, size: int, mesh: Mesh, accumulate: int = 1) -> None:
  """Raises UserError unless the devices, and the parts of an accumulated batch, can share `size` examples."""
  parts = mesh.size * accumulate
  if size < 1 or size % parts:
    devices = f'{mesh.size} device{"s" if mesh.size > 1 else ""}'
    times = f' × {accumulate} accumulated parts' if accumulate > 1 else ''
    near = max(size // parts, 1) * parts
    raise UserError(f'{what} {size} cannot be shared by {devices}{times}: use a multiple of {parts}, such as {near}')
