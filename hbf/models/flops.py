"""Floating-point operations of a function, counted in the program that JAX traces. Nothing is compiled."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params


def _outputs(equation: Any) -> int:
  return equation.outvars[0].aval.size


def _inputs(equation: Any) -> int:
  return equation.invars[0].aval.size


def _product(equation: Any) -> int:
  (contracted, _), _ = equation.params['dimension_numbers']
  return 2 * _outputs(equation) * math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)


def _convolution(equation: Any) -> int:
  kernel = equation.invars[1].aval
  return 2 * _outputs(equation) * kernel.size // kernel.shape[equation.params['dimension_numbers'].rhs_spec[0]]


def _kernel(equation: Any) -> int:
  estimate = equation.params['cost_estimate']
  return estimate.flops if estimate else 0


def _window(equation: Any) -> int:
  return _outputs(equation) * math.prod(equation.params['window_dimensions'])


PRECISIONS = ('bfloat16', 'float32', 'highest')  # precisions of products

Cost = Callable[[Any], int]
Costs = Mapping[str, Cost]

_ELEMENTWISE = (
  'abs add add_any cbrt ceil clamp cos cummax cumsum div erf erf_inv erfc exp exp2 expm1 floor integer_pow log log1p '
  'logistic max min mul neg pow rem round rsqrt sign sin sqrt square sub tan tanh'
)
_REDUCTIONS = 'reduce_max reduce_min reduce_prod reduce_sum'

# The cost of an equation of a jaxpr, by the name of its primitive. Other primitives cost nothing.
PRODUCTS: Costs = {'dot_general': _product, 'conv_general_dilated': _convolution, 'pallas_call': _kernel}
ARITHMETIC: Costs = {
  **PRODUCTS,
  **dict.fromkeys(_ELEMENTWISE.split(), _outputs),
  **dict.fromkeys(_REDUCTIONS.split(), _inputs),
  'reduce_window_max': _window,
  'reduce_window_sum': _window,
}


def count_flops(function: Callable, *args: Any, costs: Costs = ARITHMETIC) -> int:
  """Count the floating-point operations of a call with these arguments (arrays or shapes).

  A product or convolution that sums over k numbers takes 2k operations for each output. Arithmetic on single numbers,
  such as an exponential, takes one operation for each output. A sum or a maximum takes one for each input. Moves,
  comparisons, conversions and integer arithmetic take no operations. A loop counts as often as it runs, or once if
  the number of runs is unknown. A condition counts as its most expensive branch. `jax.lax.platform_dependent` counts
  as its last branch, which is the default if there is one. A Pallas kernel counts as its cost estimate, which leaves
  out the padding of its blocks.

  Args:
    function: a function of arrays.
    *args: arguments of the function.
    costs: the cost of each primitive. `PRODUCTS` counts only matrix products, convolutions and Pallas kernels.
  """
  return count_jaxpr(jax.make_jaxpr(function)(*args).jaxpr, costs)


def count_jaxpr(jaxpr: Any, costs: Costs = ARITHMETIC, platform: str = '') -> int:
  """Count the floating-point operations of a traced program, as `count_flops` does.

  Args:
    jaxpr: the program.
    costs: the cost of each primitive.
    platform: a lowering platform, such as 'cuda'. `jax.lax.platform_dependent` then counts as the branch of this
      platform if there are products in it. A kernel of cuDNN is not counted, so a branch of only such a kernel counts
      as the last branch.
  """
  return sum(count_equation(equation, costs, platform) for equation in jaxpr.eqns)


def count_products(jaxpr: Any, platform: str = '') -> dict[str, int]:
  """Count the operations of matrix products, convolutions and Pallas kernels, for each precision.

  A device's speed depends on the precision, so there is a count for each. No other operations are counted.

  Args:
    jaxpr: a traced program.
    platform: as in `count_jaxpr`.

  Returns:
    The count of each precision that occurs: 'bfloat16' (all short types), 'float32' (at the backend's default
    precision, or at Precision.HIGH) and 'highest' (full float32).
  """

  def of_kind(cost: Cost, kind: str) -> Cost:
    return lambda equation: cost(equation) if _kind(equation) == kind else 0

  counts = {
    kind: count_jaxpr(jaxpr, {name: of_kind(cost, kind) for name, cost in PRODUCTS.items()}, platform)
    for kind in PRECISIONS
  }
  return {kind: count for kind, count in counts.items() if count}


def _kind(equation: Any) -> str:
  floats = [var.aval.dtype for var in equation.invars if jnp.issubdtype(var.aval.dtype, jnp.floating)]
  if not floats or min(dtype.itemsize for dtype in floats) < 4:
    return 'bfloat16'
  if equation.primitive.name == 'pallas_call':  # this library's kernels multiply at full float32 precision
    return 'highest'
  precision = equation.params['precision']
  first = precision[0] if isinstance(precision, tuple) else precision
  return 'highest' if first == jax.lax.Precision.HIGHEST else 'float32'


def count_equation(equation: Any, costs: Costs = ARITHMETIC, platform: str = '') -> int:
  """Count the floating-point operations of one equation of a traced program, as `count_jaxpr` does."""
  name, params = equation.primitive.name, equation.params
  if name == 'cond':
    branches = [branch.jaxpr for branch in params['branches']]
    if platforms := params.get('branches_platforms'):
      return count_jaxpr(_branch(branches, platforms, platform), costs, platform)
    return max(count_jaxpr(branch, costs, platform) for branch in branches)
  inner = [] if name in costs else list(jaxprs_in_params(params))
  if inner:  # a loop, or another wrapper of a function
    times = params['length'] if name == 'scan' else params['mesh'].size if name == 'shard_map' else 1
    return times * sum(count_jaxpr(part, costs, platform) for part in inner)
  floating = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating) if equation.outvars else False
  return costs[name](equation) if floating and name in costs else 0


def _branch(branches: list[Any], platforms: Any, platform: str) -> Any:
  """Return the branch of `jax.lax.platform_dependent` that counts. `platforms` has the platforms of each branch."""
  chosen = (branch for branch, names in zip(branches, platforms, strict=True) if names and platform in names)
  return next((branch for branch in chosen if count_jaxpr(branch, PRODUCTS, platform)), branches[-1])
