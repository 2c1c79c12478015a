"""The sharding of arrays on a mesh of devices. Only this module assigns arrays to devices.

The mesh has three axes. Batches, and images in device memory, are split over data and fsdp. Parameters and their
optimizer state are split over fsdp, if the size of fsdp divides one of their axes. Some are also split over tensor
(`hbf.training.rules`). Nothing splits the parameters along data.
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
from hbf.ops.fast.choice import check_pallas_platform
from hbf.ops.layout import BATCH, TENSOR
from hbf.training.rules import rule_of

AXES = (*BATCH, *TENSOR)
DATA_PARALLEL = {'data': -1, 'fsdp': 1, 'tensor': 1}  # only batches are split


def make_mesh(devices: Sequence[jax.Device], sizes: Mapping[str, int] = DATA_PARALLEL) -> Mesh:
  """Return a mesh of all the devices.

  Args:
    devices: the devices.
    sizes: the number of devices along each of `AXES`. One of them may be −1, which takes all remaining devices.

  Raises:
    UserError: the devices can't form the mesh.
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
  """Return the sharding of arrays that every device holds."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Return the sharding of arrays whose first axis is the batch."""
  return NamedSharding(mesh, PartitionSpec(BATCH))


def batch_shares(mesh: Mesh) -> int:
  """Return the number of shards into which a batch is split."""
  return math.prod(mesh.shape[axis] for axis in BATCH)


def state_sharding(mesh: Mesh, state: Any) -> Any:
  """Return a sharding for every leaf of a training state or of its shapes.

  A leaf of the optimizer's state has the sharding of the parameter with the same name. Some arrays of Adafactor's
  state are sums over an axis of a parameter, so they lack this axis. The parameter's rule is applied to their shape.
  """

  def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
    names = tuple(key for key in path if isinstance(key, DictKey))
    return NamedSharding(mesh, parameter_spec(names, leaf.shape, mesh) if names else PartitionSpec())

  return jax.tree_util.tree_map_with_path(sharding, state)


def with_sharding(shapes: Any, mesh: Mesh) -> Any:
  """Return a tree of `jax.ShapeDtypeStruct`s, each with the sharding that its array gets on this mesh."""
  return jax.tree.map(
    lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
    shapes,
    state_sharding(mesh, shapes),
  )


def parameter_spec(path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
  """Return the partition of a parameter.

  The mesh axis `tensor` splits the array axis that the parameter's rule names (`hbf.training.rules`). The mesh axis
  `fsdp` splits the longest of the other array axes. An array axis is split only if its length is a multiple of the
  size of the mesh axis. Vectors are not split over fsdp, because they are short.

  Args:
    path: the path of the parameter, as JAX keys.
    shape: the shape of the parameter.
    mesh: the devices.
  """
  axes: list[str | None] = [None] * len(shape)
  along, tensor = rule_of(path).tensor, mesh.shape['tensor']
  if along is not None and along < len(shape) and tensor > 1 and shape[along] % tensor == 0:
    axes[along] = 'tensor'
  fsdp = mesh.shape['fsdp']
  free = [i for i, axis in enumerate(axes) if axis is None and shape[i] % fsdp == 0]
  if fsdp > 1 and sum(length > 1 for length in shape) > 1 and free:
    axes[max(free, key=lambda i: shape[i])] = 'fsdp'
  return PartitionSpec(*axes)


def check_batch_size(what: str, size: int, mesh: Mesh, accumulate: int = 0) -> None:
  """Check that `size` examples can be split into `accumulate` parts, and each part over the devices.

  If `accumulate` is 0, there is one part, or `hbf.training.batch_parts` chooses a number that fits.

  Raises:
    UserError: `size` is not a multiple of the number of shards of a batch times `accumulate`. The message names the
      config key `what`.
  """
  shares = batch_shares(mesh)
  parts = shares * max(accumulate, 1)
  if size < 1 or size % parts:
    if shares == mesh.size:
      who = _count(shares, 'device')
    else:
      who = f'mesh.data {mesh.shape["data"]} × mesh.fsdp {mesh.shape["fsdp"]} = {shares} shares of devices'
    times = f' × {accumulate} accumulated parts' if accumulate > 1 else ''
    near = max(size // parts, 1) * parts
    raise UserError(f'{what} {size} cannot be shared by {who}{times}: use a multiple of {parts}, such as {near}')


def check_tensor(model: ConfigDict, mesh: Mesh) -> None:
  """Check that the heads and units of a network can be split over the mesh axis `tensor`.

  Args:
    model: the `model` part of a config.
    mesh: the mesh.

  Raises:
    UserError: the size of the mesh axis does not divide the number of heads or of units.
  """
  size = mesh.shape['tensor']
  heads = {'heads': model.heads} if takes_heads(model.name) else {}
  for option, count in (heads | units_of(model)).items():
    if count % size:
      near = max(count // size, 1) * size
      raise UserError(
        f'mesh.tensor {size} does not divide model.{option} {count}, which is split over it: '
        f'use a multiple of {size}, such as {near}, or another mesh.tensor'
      )


def check_implementation(model: ConfigDict, mesh: Mesh) -> None:
  """Check that the devices can run the implementation of stage 2, before anything is compiled.

  Args:
    model: the `model` part of a config.
    mesh: the mesh.

  Raises:
    UserError: the implementation is for other devices.
  """
  if (model.stage2 or {}).get('implementation') == 'pallas':
    check_pallas_platform(mesh.devices.flat[0].platform)


def _asked(sizes: Mapping[str, int]) -> str:
  return ' × '.join(f'mesh.{axis} {sizes[axis]}' for axis in AXES)


def _count(number: int, what: str) -> str:
  return f'{number} {what}{"" if number == 1 else "s"}'
