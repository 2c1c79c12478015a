"""The layout of arrays on JAX's mesh of devices (`jax.set_mesh`), described by the names of the mesh axes.

Batches are split over the mesh axes `BATCH`. Heads, hidden units and centers are split over the axis `TENSOR`.
Without a mesh, or on a mesh of one device, the functions for these axes do nothing. They also do nothing for axes
whose layout is not XLA's to choose (of a type other than `AxisType.Auto`), as inside of `jax.shard_map`.

`explicit_split`, `as_rows_of` and `laid_out_by_xla` are for explicit axes, which may have any names.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

BATCH = ('data', 'fsdp')
TENSOR = ('tensor',)


def _sizes() -> dict[str, int]:
  """Return the sizes of the mesh axes over which XLA splits arrays, by name."""
  mesh = jax.sharding.get_abstract_mesh()
  axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
  return {name: size for name, size, kind in axes if kind == AxisType.Auto}


def shares(axes: tuple[str, ...]) -> int:
  """Return the number of shards along the given mesh axes."""
  sizes = _sizes()
  return math.prod(sizes.get(axis, 1) for axis in axes)


def constrain(z: jax.Array, *axes: tuple[str, ...] | None) -> jax.Array:
  """Constrain the layout of an array. If shards cannot have equal size, XLA chooses the layout.

  Args:
    z: any array.
    *axes: for each axis of the array, the mesh axes that split it. None: the axis is not split.
  """
  if not {*BATCH, *TENSOR} <= {*_sizes()} or jax.sharding.get_abstract_mesh().size == 1:
    return z
  if any(length % shares(over or ()) for length, over in zip(z.shape, axes, strict=True)):
    return z
  return jax.lax.with_sharding_constraint(z, PartitionSpec(*axes))


def replicate(parameter: jax.Array, *axes: tuple[str, ...] | None) -> jax.Array:
  """Constrain the layout of a parameter where it is used. The arguments are those of `constrain`.

  If the mesh axis `data` has several shards, the gradient has the layout in which the parameter is stored. So no
  device sums the whole gradient over all devices and hosts. If the axis has one shard, the gradient has the same
  layout as the result.
  """
  # On such a mesh, a TPU's compiler would sum a gradient of the parameter's own layout in a loop over the shards,
  # which costs more traffic.
  if constrain(parameter, *axes) is parameter or shares(('data',)) == 1:
    return constrain(parameter, *axes)
  gather = jax.custom_vjp(lambda z: constrain(z, *axes))
  gather.defvjp(lambda z: (constrain(z, *axes), None), lambda _, gradient: (gradient,))
  return gather(parameter)


def explicit_split(z: jax.Array) -> PartitionSpec:
  """Return the explicit mesh axes that split each axis of an array."""
  return jax.typeof(z).sharding.spec


def as_rows_of(z: jax.Array, rows: jax.Array) -> jax.Array:
  """Broadcast rows [..., C] to the leading axes of z [..., D], D ≥ 1. The result is split over devices like z."""
  return jnp.zeros_like(z[..., :1], dtype=rows.dtype) + rows


def vary_together(arrays: Any) -> Any:
  """Return a pytree of arrays that all vary along the same axes of `jax.shard_map`: along each axis of any of them.

  Inside `jax.shard_map` with check_vma, JAX knows along which mesh axes an array may differ between devices. A loop
  needs its carry, and a `jax.custom_vjp` its cotangents, to vary along the axes of the arrays they belong to. The
  gradient is summed over the added axes. Elsewhere this function changes nothing.
  """
  axes = frozenset[str]().union(*map(_varying, jax.tree.leaves(arrays)))

  def cast(z: jax.Array) -> jax.Array:
    missing = axes - _varying(z)
    return jax.lax.pcast(z, tuple(sorted(missing)), to='varying') if missing else z

  return jax.tree.map(cast, arrays)


def _varying(z: jax.Array) -> frozenset[str]:
  """Return the axes of `jax.shard_map` along which an array varies."""
  kind: Any = jax.typeof(z)
  return kind.vma if hasattr(kind, 'vma') else kind.manual_axis_type.varying  # the name depends on JAX's version


def laid_out_by_xla(f: Callable[..., Any], split: PartitionSpec, *arguments: Any) -> Any:
  """Call f(*arguments). If an array lies on a mesh with explicit axes, XLA chooses all layouts inside of the call.

  JAX does not choose them there: it refuses to merge a split axis with axes before it, and to multiply matrices whose
  contracted axes are both split.

  Args:
    f: a function whose results are arrays.
    split: the explicit mesh axes that split the first axes of each result. The other axes are not split.
    *arguments: pytrees. Leaves that are no arrays of JAX, such as numbers, reach f as they are.
  """
  leaves, structure = jax.tree.flatten(arguments)
  arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
  meshes = (jax.typeof(z).sharding.mesh for z in arrays.values())
  mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
  if mesh is None:
    return f(*arguments)

  def inside(arrays: dict[int, jax.Array]) -> Any:
    return f(*jax.tree.unflatten(structure, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]))

  return jax.sharding.auto_axes(inside, axes=mesh.explicit_axes, out_sharding=NamedSharding(mesh, split))(arrays)


def interleave_shards(columns: jax.Array, parts: int) -> jax.Array:
  """Reorder columns [..., parts · W] so that every shard along the mesh axis `tensor` has columns of each part.

  In the original order, the W columns of a part are neighbors. A shard would have columns of few parts, and
  `split_parts` would move columns between devices.
  """
  count = shares(TENSOR)
  if count == 1 or columns.shape[-1] % (parts * count):
    return columns
  *rows, width = columns.shape
  ordered = columns.reshape(*rows, parts, count, width // parts // count).swapaxes(-3, -2)
  return constrain(ordered.reshape(columns.shape), *(None for _ in rows), TENSOR)


def split_parts(z: jax.Array, parts: int) -> list[jax.Array]:
  """Split an array [rows, parts · W], whose columns `interleave_shards` has reordered, into its parts [rows, W]."""
  count, (length, width) = shares(TENSOR), z.shape
  if count == 1 or width % (parts * count):
    return jnp.split(z, parts, axis=-1)
  shared = z.reshape(length, count, parts, width // parts // count)
  return [shared[:, :, part].reshape(length, width // parts) for part in range(parts)]
