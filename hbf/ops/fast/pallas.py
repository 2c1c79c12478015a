"""The sums of `hbf.ops.fast.sums` as fused kernels for TPUs, in JAX's Pallas.

At any time, only the responses of one block of points to one block of centers are in memory. As in flash attention
(Dao et al. 2022), the sums are divided by the largest response so far. They are rescaled when a larger response
comes. The gradient computes the responses again. One kernel computes the gradient for the points, by sums over the
centers. Another kernel computes the gradient for the centers, by sums over the points.

A Pallas kernel runs as a grid of steps, one after another. The grid's last axis runs over the blocks that are added
to a sum, which stays in fast memory meanwhile. The argument `kernel` of the functions is the name of a radial kernel
(`hbf.ops.kernels.KERNELS`).

The kernels are tested on a CPU, which interprets them, and they compile for TPUs. They have not been measured on a
TPU. XLA cannot split such a kernel over devices. So this module splits the points over the devices of `jax.set_mesh`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from hbf.ops.distances import Distances
from hbf.ops.fast.sums import PivotedSums, Sums, center, pull_back
from hbf.ops.kernels import KERNELS

_POINTS, _CENTERS = 256, 128  # number of points and of centers in a block
_LANES = 128  # a TPU's vector has 128 lanes, so a block has a multiple of 128 columns
# Options of `pallas_call`, by platform.
_OPTIONS: dict[str, dict[str, Any]] = {
  'cpu': {'interpret': True},
  'tpu': {'compiler_params': pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel', 'arbitrary'))},
}


def pallas_sums(distances: Distances, coefficients: Float[Array, '... A V'], kernel: str) -> Sums:
  """Compute `Sums` for every point, as `hbf.ops.fast.sums.kernel_sums` does.

  On a CPU, Pallas interprets its kernels, which is slow. If a mesh is set (`jax.set_mesh`) and its number of devices
  divides the number of points, the points are split over all its devices.

  Args:
    distances: the parts of the scaled squared distances s, for points [..., N, D] and centers [..., A, D].
    coefficients: c [..., A, V].
    kernel: a name in `hbf.ops.kernels.KERNELS`.
  """
  leading = coefficients.shape[:-2]
  flat = jax.tree.map(lambda z: z.reshape(math.prod(leading), *z.shape[-2:]), (distances, coefficients))
  sums = functools.partial(_sums, kernel)
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.size > 1 and distances.points.shape[-2] % mesh.size == 0:
    rows: Any = PartitionSpec(None, mesh.axis_names)
    whole: Any = PartitionSpec()
    split = (Distances(rows, rows, whole, whole, whole), whole)
    # check_vma is off because a kernel's results have no type that says along which axes they vary.
    sums = jax.shard_map(sums, mesh=mesh, in_specs=split, out_specs=rows, check_vma=False)
  return jax.tree.map(lambda z: z.reshape(*leading, *z.shape[-2:]), sums(*flat))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(kernel: str, distances: Distances, coefficients: jax.Array) -> Sums:
  return _forward(kernel, distances, coefficients)[0]


def _forward(kernel: str, distances: Distances, coefficients: jax.Array) -> Any:
  values, total, squares, log_peak, pivot = _run(_SUMS, kernel, distances, coefficients, ())
  sums = center(PivotedSums(values, total, squares, pivot, log_peak), coefficients)
  return sums, (distances, coefficients, sums.moments)


def _backward(kernel: str, residuals: Any, cotangents: Sums) -> Any:
  distances, coefficients, moments = residuals
  pull = pull_back(cotangents, moments, coefficients)
  assert pull.of_moments is not None
  inputs = (kernel, distances, coefficients, (pull.given, *pull.of_moments, pull.log_peak))
  of_points, of_norms = _run(_OF_POINTS, *inputs)
  of_centers, of_center_norms, of_scale, of_coefficients = _run(_OF_CENTERS, *inputs)
  gradient = Distances(of_points, of_norms, of_centers, of_center_norms.mT, of_scale.mT)
  return jax.tree.map(lambda d, z: d.astype(z.dtype), (gradient, of_coefficients), (distances, coefficients))


_sums.defvjp(_forward, _backward)


class _Block(NamedTuple):
  """A block of points and a block of centers: Pallas references to the rows of the inputs.

  Attributes:
    distances: references to the parts of the distances, with center_norms and scale as rows [1, A].
    coefficients: reference to the coefficients, [A, V].
    given: () in the forward pass. In the backward pass, references to the five arrays of a
      `hbf.ops.fast.sums.ResponseCotangents`: the one of its field `given`, the three of `of_moments`, and `log_peak`.
    remaining: number of centers from the block's first center to the last center that is not padding.
  """

  distances: Distances
  coefficients: Any
  given: Any
  remaining: jax.Array


def _add_sums(kernel: str, block: _Block, sums: Any) -> Any:
  """Add the terms of a block of centers to `sums`, for a block of points. Return the new sums.

  The sums are the fields of `hbf.ops.fast.sums.PivotedSums`, with the pivot last. The pivot is the mean of
  k_a = K_a / max K over the first block of centers.
  """
  log_k, _, _ = _log_responses(kernel, block)
  values, total, squares, log_peak, pivot = sums
  peak = jnp.maximum(log_peak, log_k.max(axis=1, keepdims=True))
  k, shrink = jnp.exp(log_k - peak), jnp.exp(log_peak - peak)
  mean = k.sum(axis=1, keepdims=True) / jnp.minimum(block.remaining, k.shape[1])
  pivot = jnp.where(log_peak == -math.inf, mean, shrink * pivot)
  u = jnp.where(log_k == -math.inf, 0.0, k - pivot)
  c = block.coefficients[...]
  return (
    shrink * values + _dot(u.astype(c.dtype), c, 1, 0),
    shrink * total + u.sum(axis=1, keepdims=True),
    shrink * shrink * squares + (u * u).sum(axis=1, keepdims=True),
    peak,
    pivot,
  )


def _add_of_points(kernel: str, block: _Block, sums: Any) -> Any:
  """Add the terms of a block of centers to `sums`, for a block of points. Return the new sums.

  The sums are the cotangents of the points and of their norms.
  """
  of_squares, _, _ = _cotangents(kernel, block)
  t = block.distances.centers[...]
  of_points, of_norms = sums
  return (
    of_points - 2 * _dot(of_squares.astype(t.dtype), t, 1, 0),
    of_norms + of_squares.sum(axis=1, keepdims=True),
  )


def _add_of_centers(kernel: str, block: _Block, sums: Any) -> Any:
  """Add the terms of a block of points to `sums`, for a block of centers. Return the new sums.

  The sums are the cotangents of the centers, their norms, their scale and their coefficients.
  """
  of_squares, of_scale_each, deviations = _cotangents(kernel, block)
  x, of_values = block.distances.points[...], block.given[0][...]
  of_centers, of_center_norms, of_scale, of_coefficients = sums
  return (
    of_centers - 2 * _dot(of_squares.astype(x.dtype), x, 0, 0),
    of_center_norms + of_squares.sum(axis=0, keepdims=True),
    of_scale + of_scale_each.sum(axis=0, keepdims=True),
    of_coefficients + _dot(deviations.astype(of_values.dtype), of_values, 0, 0),
  )


def _log_responses(kernel: str, block: _Block) -> tuple[jax.Array, jax.Array, Callable]:
  """Return log K and r² of each pair of a point and a center in a block.

  Also return the vector-Jacobian product of the function log K(s).
  """
  points, norms, centers, center_norms, scale = (ref[...] for ref in block.distances)
  squares = norms + center_norms - 2 * _dot(points, centers, 1, 1)
  log_k, pull = jax.vjp(KERNELS[kernel], scale * squares)
  exists = jax.lax.broadcasted_iota(jnp.int32, log_k.shape, 1) < block.remaining
  return jnp.where(exists, log_k, -jnp.inf), squares, pull


def _cotangents(kernel: str, block: _Block) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Compute the cotangents of r² and of the center's scale for each pair of a point and a center in a block.

  Also return k − k̄ of each pair, as defined in `hbf.ops.fast.sums`.
  """
  log_k, squares, pull = _log_responses(kernel, block)
  given, constant, slope, mean, log_peak = (ref[...] for ref in block.given)
  k = jnp.exp(log_k - log_peak)
  deviations = k - mean
  of_k = _dot(given, block.coefficients[...], 1, 1)
  of_k += constant + slope * deviations
  (of_scaled,) = pull(of_k * k)
  return of_scaled * block.distances.scale[...], of_scaled * squares, deviations


def _dot(a: jax.Array, b: jax.Array, axis: int, other: int) -> jax.Array:
  """Multiply two matrices with float32 sums over axis `axis` of a and axis `other` of b.

  float32 inputs are multiplied at full precision.
  """
  precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  contracted = (((axis,), (other,)), ((), ()))
  return jax.lax.dot_general(a, b, contracted, precision=precision, preferred_element_type=jnp.float32)


class _Job(NamedTuple):
  """The sums that a Pallas kernel computes.

  Attributes:
    add: function of (kernel, block, sums) that returns new sums.
    over: 'a' to sum over the centers for blocks of points, 'n' to sum over the points for blocks of centers.
    axes: the two axes of each sum, one letter each: n for points, a for centers, d for the D dimensions, v for the V
      columns of the coefficients, and 1 for an axis of length 1.
    start: initial value of each sum.
    products: number of matrix products over the D dimensions, and number of matrix products over the V columns. The
      cost estimate uses both numbers.
  """

  add: Callable[[str, _Block, Any], Any]
  over: str
  axes: tuple[str, ...]
  start: tuple[float, ...]
  products: tuple[int, int]


_SUMS = _Job(_add_sums, 'a', ('nv', 'n1', 'n1', 'n1', 'n1'), (0.0, 0.0, 0.0, -math.inf, 0.0), (1, 1))
_OF_POINTS = _Job(_add_of_points, 'a', ('nd', 'n1'), (0.0, 0.0), (2, 1))
_OF_CENTERS = _Job(_add_of_centers, 'n', ('ad', '1a', '1a', 'av'), (0.0, 0.0, 0.0, 0.0), (2, 2))
_ARITHMETIC = 10  # estimated operations for each pair of a point and a center, without the matrix products

# The axes of the inputs, after the leading one: n points, a centers, d features of both, v of the coefficients.
_AXES = ('nd', 'n1', 'ad', '1a', '1a', 'av'), ('nv', 'n1', 'n1', 'n1', 'n1')


def _run(job: _Job, kernel: str, distances: Distances, coefficients: jax.Array, given: tuple) -> Any:
  """Compute the sums of a job in float32, by the Pallas kernel for the platform that runs it.

  All arrays have a leading axis of length L, over which the Pallas kernel is repeated. `kernel` is the name of the
  radial kernel, and `given` has the arrays of `_Block.given`.
  """
  distances = distances._replace(center_norms=distances.center_norms.mT, scale=distances.scale.mT)
  forms = {name: functools.partial(_call, job, kernel, options) for name, options in _OPTIONS.items()}
  return jax.lax.platform_dependent((*distances, coefficients), tuple(given), **forms)


def _call(job: _Job, kernel: str, options: dict[str, Any], inputs: tuple, given: tuple) -> Any:
  """Compute the sums of a job by a Pallas kernel with the options of one platform.

  `inputs` has the five arrays of the distances and then the coefficients. `given` has the arrays of `_Block.given`.
  """
  size = {'n': inputs[0].shape[1], 'a': inputs[2].shape[1], 'd': inputs[0].shape[2], 'v': inputs[5].shape[2], '1': 1}
  unit = {'n': _POINTS, 'a': _CENTERS, '1': 1} | {x: pl.align_to(size[x], _LANES) for x in 'dv'}
  padded = {x: pl.align_to(size[x], unit[x]) for x in size}
  held = 'n' if job.over == 'a' else 'a'
  grid = (len(inputs[0]), *(padded[x] // unit[x] for x in (held, job.over)))

  def spec(axes: str) -> pl.BlockSpec:
    def index(lead: Any, program: Any, step: Any) -> Any:
      at = {held: program, job.over: step}
      return (lead, *(at.get(x, 0) for x in axes))

    return pl.BlockSpec((None, *(unit[x] for x in axes)), index)

  axes = _AXES[0] + (_AXES[1] if given else ())
  # log_peak, the last array, is infinite for padding. So the responses of padding are 0, also with metric bilinear.
  fills = [0.0] * (len(axes) - 1) + [math.inf if given else 0.0]
  shapes = [[padded[x] for x in ax] for ax in axes]
  arrays = [_pad(*parts) for parts in zip((*inputs, *given), shapes, fills, strict=True)]
  sums = pl.pallas_call(
    functools.partial(_kernel, job, kernel, size['a']),
    grid=grid,
    in_specs=[spec(ax) for ax in axes],
    out_specs=[spec(ax) for ax in job.axes],
    out_shape=[jax.ShapeDtypeStruct((grid[0], *(padded[x] for x in ax)), jnp.float32) for ax in job.axes],
    cost_estimate=_cost(job, grid[0], size, arrays),
    **options,
  )(*arrays)
  return tuple(z[:, : size[ax[0]], : size[ax[1]]] for z, ax in zip(sums, job.axes, strict=True))


def _kernel(job: _Job, kernel: str, centers: int, *refs: Any) -> None:
  """Add one block to the sums of a job, in one step of the grid.

  Args:
    job: the sums to compute.
    kernel: name of the radial kernel.
    centers: number of centers without padding.
    *refs: references to the inputs, and then to the outputs.
  """
  inputs, outputs = refs[: -len(job.axes)], refs[-len(job.axes) :]
  program, step = pl.program_id(1), pl.program_id(2)
  remaining = centers - (step if job.over == 'a' else program) * _CENTERS
  block = _Block(Distances(*inputs[:5]), inputs[5], inputs[6:], remaining)

  def write(sums: Any) -> None:
    for ref, z in zip(outputs, sums, strict=True):
      ref[...] = z

  start = tuple(jnp.full(ref.shape, z, jnp.float32) for ref, z in zip(outputs, job.start, strict=True))
  pl.when(step == 0)(lambda: write(start))
  write(job.add(kernel, block, tuple(ref[...] for ref in outputs)))


def _cost(job: _Job, leading: int, size: dict[str, int], arrays: list[jax.Array]) -> pl.CostEstimate:
  """Estimate the cost of the sums of a job. Padding is not counted.

  Args:
    job: the sums to compute.
    leading: length L of the leading axis.
    size: length of each axis, by the letter of the axis (`_Job.axes`).
    arrays: the arrays that the Pallas kernel reads.
  """
  pairs = leading * size['n'] * size['a']
  products = 2 * (job.products[0] * size['d'] + job.products[1] * size['v'])
  return pl.CostEstimate(
    flops=pairs * (products + _ARITHMETIC),
    transcendentals=pairs,
    bytes_accessed=sum(z.size * z.dtype.itemsize for z in arrays),
  )


def _pad(z: jax.Array, shape: list[int], fill: float) -> jax.Array:
  """Pad z [L, ...] to [L, *shape] with `fill`."""
  return jnp.pad(z, [(0, 0), *((0, b - a) for a, b in zip(z.shape[1:], shape, strict=True))], constant_values=fill)
