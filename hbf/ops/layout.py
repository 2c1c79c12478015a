"""How arrays lie on the mesh of devices that JAX has been given (`jax.set_mesh`), by the names of its axes.

Batches are split over `BATCH`; heads, hidden units and centers over `TENSOR`. Without a mesh, or where an axis has
one device only, nothing here does anything.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

BATCH = ('data', 'fsdp')
TENSOR = ('tensor',)


def shares(axes: tuple[str, ...]) -> int:
  """In how many shares the mesh divides what is split over these of its axes."""
  mesh = jax.sharding.get_abstract_mesh()
  return math.prod(mesh.shape.get(axis, 1) for axis in axes)


def constrain(z: jax.Array, *axes: tuple[str, ...] | None) -> jax.Array:
  """The array, split as said, or left as XLA likes it where the mesh can't divide it so.

  Args:
    z: any array.
    *axes: for each of its axes the mesh's axes that it is split over, or None: it isn't.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not {*BATCH, *TENSOR} <= {*mesh.axis_names} or mesh.size == 1:
    return z
  if any(length % shares(over or ()) for length, over in zip(z.shape, axes, strict=True)):
    return z
  return jax.lax.with_sharding_constraint(z, PartitionSpec(*axes))


def replicate(parameter: jax.Array, *axes: tuple[str, ...] | None) -> jax.Array:
  """A parameter, split as `constrain` says where it is used; its gradient lies as the parameter does.

  Constrained as its value is, the gradient would be summed whole over all devices, those of other hosts included.
  Where data has one share it is so constrained, as nothing leaves fsdp: a TPU's compiler would otherwise sum in a
  loop over shares, at more traffic than it saves (HyperBF of ViT-B's size on v5e-16: 99 GB a step instead of 79).
  """
  if constrain(parameter, *axes) is parameter or shares(('data',)) == 1:
    return constrain(parameter, *axes)
  gather = jax.custom_vjp(lambda z: constrain(z, *axes))
  gather.defvjp(lambda z: (constrain(z, *axes), None), lambda _, gradient: (gradient,))
  return gather(parameter)


def interleave_shards(columns: jax.Array, parts: int) -> jax.Array:
  """Columns [..., parts · W] in the order of their shares over TENSOR: from each part its W/shares, share by share.

  A device then has its share of every part, where the columns as they come would give it one part and none of others.
  """
  count = shares(TENSOR)
  if count == 1 or columns.shape[-1] % (parts * count):
    return columns
  *rows, width = columns.shape
  ordered = columns.reshape(*rows, parts, count, width // parts // count).swapaxes(-3, -2)
  return constrain(ordered.reshape(columns.shape), *(None for _ in rows), TENSOR)


def split_parts(z: jax.Array, parts: int) -> list[jax.Array]:
  """The parts, [T, W] each, of what `interleave_shards` ordered, [T, parts · W]."""
  count, (length, width) = shares(TENSOR), z.shape
  if count == 1 or width % (parts * count):
    return jnp.split(z, parts, axis=-1)
  shared = z.reshape(length, count, parts, -1)
  return [shared[:, :, part].reshape(length, -1) for part in range(parts)]
