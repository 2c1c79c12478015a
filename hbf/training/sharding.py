"""Where arrays lie on a mesh of devices. Computation never names devices: these answers are all that does.

The mesh has three axes. Batches, and images in device memory, are split over data and fsdp. Parameters, with what the
optimizer knows of them, are split over fsdp wherever it divides them, and over tensor as their rules say
(`hbf.training.rules`); data has a copy of them in each of its shares.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey
from ml_collections import ConfigDict

from hbf.errors import UserError
from hbf.models.matching import units_of
from hbf.nn.registry import takes_heads
from hbf.ops.layout import BATCH, TENSOR
from hbf.training.rules import rule_of

AXES = (*BATCH, *TENSOR)
IN_A_ROW = {'data': -1, 'fsdp': 1, 'tensor': 1}  # batches are split, nothing else


def make_mesh(devices: Sequence[jax.Device], sizes: Mapping[str, int] = IN_A_ROW) -> Mesh:
  """A mesh of the devices.

  Args:
    devices: all of which it takes.
    sizes: devices along each of `AXES`; −1, for one of them: as many as are left.

  Raises:
    UserError: the devices can't form it.
  """
  shape = [sizes[axis] for axis in AXES]
  known = math.prod(size for size in shape if size != -1)
  if shape.count(-1) > 1 or any(size < 1 and size != -1 for size in shape):
    raise UserError(f'{_asked(sizes)}: each must be 1 or more, and one of them may be -1, which takes what is left')
  if len(devices) % known or (-1 not in shape and len(devices) != known):
    raise UserError(
      f'{_asked(sizes)} cannot be formed of {_count(len(devices), "device")}: their product must be '
      f'{len(devices)}; set one of them to -1, which takes what is left, and let the others divide it'
    )
  shape = [len(devices) // known if size == -1 else size for size in shape]
  return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
  """For arrays that every device holds."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """For arrays whose first axis is the batch."""
  return NamedSharding(mesh, PartitionSpec(BATCH))


def batch_shares(mesh: Mesh) -> int:
  """In how many shares a batch is divided."""
  return math.prod(mesh.shape[axis] for axis in BATCH)


def state_sharding(mesh: Mesh, state: Any) -> Any:
  """A sharding for every leaf of a training state, or its shapes: what is named as a parameter lies like it."""

  def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
    names = tuple(key for key in path if isinstance(key, DictKey))
    return NamedSharding(mesh, parameter_spec(names, leaf.shape, mesh) if names else PartitionSpec())

  return jax.tree_util.tree_map_with_path(sharding, state)


def parameter_spec(path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
  """How a parameter is split.

  Over tensor along the axis that its rule names, over fsdp along the longest of the others, where these divide it;
  vectors are too short to be worth it.

  Args:
    path: of JAX keys.
    shape: of the parameter.
    mesh: the devices.
  """
  axes: list[str | None] = [None] * len(shape)
  along = rule_of(path).tensor
  if along is not None and mesh.shape['tensor'] > 1 and shape[along] % mesh.shape['tensor'] == 0:
    axes[along] = 'tensor'
  fsdp = mesh.shape['fsdp']
  free = [i for i, axis in enumerate(axes) if axis is None and shape[i] % fsdp == 0]
  if fsdp > 1 and sum(length > 1 for length in shape) > 1 and free:
    axes[max(free, key=lambda i: shape[i])] = 'fsdp'
  return PartitionSpec(*axes)


def check_batch_size(what: str, size: int, mesh: Mesh, accumulate: int = 1) -> None:
  """Raises UserError unless the devices, and the parts of an accumulated batch, can share `size` examples."""
  shares = batch_shares(mesh)
  parts = shares * accumulate
  if size < 1 or size % parts:
    if shares == mesh.size:
      who = _count(shares, 'device')
    else:
      who = f'mesh.data {mesh.shape["data"]} × mesh.fsdp {mesh.shape["fsdp"]} = {shares} shares of devices'
    times = f' × {accumulate} accumulated parts' if accumulate > 1 else ''
    near = max(size // parts, 1) * parts
    raise UserError(f'{what} {size} cannot be shared by {who}{times}: use a multiple of {parts}, such as {near}')


def check_tensor(model: ConfigDict, mesh: Mesh) -> None:
  """Raises UserError unless heads and units of the `model` part of a config can be split over the mesh's tensor."""
  size = mesh.shape['tensor']
  heads = {'heads': model.heads} if takes_heads(model.name) else {}
  for option, count in (heads | units_of(model)).items():
    if count % size:
      near = max(count // size, 1) * size
      raise UserError(
        f'mesh.tensor {size} does not divide model.{option} {count}, which is split over it: '
        f'use a multiple of {size}, such as {near}, or another mesh.tensor'
      )


def _asked(sizes: Mapping[str, int]) -> str:
  return ' × '.join(f'mesh.{axis} {sizes[axis]}' for axis in AXES)


def _count(number: int, what: str) -> str:
  return f'{number} {what}{"" if number == 1 else "s"}'
