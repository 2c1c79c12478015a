"""The parameters of both HyperBF stages: σ and a metric for every head."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hbf.errors import choose
from hbf.options import OptionError

# For each value of the option `sigma_per`, the axes of [heads, points, centers] along which σ differs.
SIGMA_PER = {'fixed': (), 'layer': (), 'head': (0,), 'center': (0, 2)}

METRICS = ('identity', 'diagonal', 'low_rank', 'full', 'bilinear')


def sigma_parameter(
  module: nn.Module, scope: str, variance: float, heads: int, centers: int = 1
) -> Float[Array, '... 1 A']:
  """Return σ, broadcastable to [heads, points, centers]. log σ is learned, and σ² starts at `variance`.

  Args:
    module: the module that gets the parameter `log_sigma`.
    scope: 'layer', 'head' or 'center': each layer, each head or each center has its own σ. 'fixed': the layer has one
      σ, which is not learned.
    variance: the initial σ².
    heads: number of heads.
    centers: number of centers of each head.
  """
  return jnp.exp(_parameter(module, 'log_sigma', scope, 0.5 * jnp.log(variance), heads, centers))


def beta_parameter(module: nn.Module, scope: str, variance: float, heads: int, centers: int) -> Float[Array, 'H 1 A']:
  """Return β of kernel `SIGNED`, which starts at 1/2σ² with σ² = `variance`. Arguments as for `sigma_parameter`."""
  return _parameter(module, 'beta', scope, 0.5 / variance, heads, centers)


def _parameter(module: nn.Module, name: str, scope: str, start: Any, heads: int, centers: int) -> jax.Array:
  axes = choose('sigma_per', scope, SIGMA_PER)
  shape = tuple(n if axis in axes else 1 for axis, n in enumerate((heads, 1, centers)))
  value = jnp.full(shape, start, jnp.float32)
  return value if scope == 'fixed' else module.param(name, lambda _: value)


def learned_sigma(params: Mapping[str, Any]) -> jax.Array | None:
  """Return the σ of a module, computed from its parameters. None if the module has no σ."""
  return jnp.exp(params['log_sigma']) if 'log_sigma' in params else None


def mean_sigmas(params: Mapping[str, Any]) -> dict[str, dict[str, jax.Array]]:
  """Return the mean of each stage's learned σ, by block and stage, for the log of a run.

  Blocks and stages without a learned σ are left out.
  """
  found: dict[str, dict[str, jax.Array]] = {}
  for block, stages in params.items():
    for stage, of_stage in stages.items() if block.startswith('block') else ():
      if (sigma := learned_sigma(of_stage)) is not None:
        found.setdefault(block, {})[stage] = sigma.mean()
  return found


def distance_scale(metric: str, d: int, rank: int) -> float:
  """Return the initial standard deviation of xᵀMt if coordinates of x and t have variance 1.

  Each head has d dimensions, and W has `rank` rows for metric low_rank. The initial σ² of a stage is the returned
  number times the option `sigma_scale`.
  """
  return (rank if metric == 'low_rank' else d) ** 0.5


def metric_parameter(module: nn.Module, metric: str, heads: int, d: int, rank: int) -> Float[Array, 'H ...'] | None:
  """Return the weights of every head's metric, as `hbf.ops.distances.squared_distances` takes them.

  All metrics but low_rank start as the identity.

  Args:
    module: the module that gets the parameter `metric`.
    metric: name of the metric, see `squared_distances`.
    heads: number of heads.
    d: dimensions of a head.
    rank: number of rows of W for metric low_rank. This W starts with random numbers. At first, the coordinates of W x
      have the same variance as the coordinates of x.

  Returns:
    None for identity, [heads, d] for diagonal, [heads, rank, d] for low_rank, else [heads, d, d].

  Raises:
    UserError: the metric is unknown.
    OptionError: the rank is not between 1 and d.
  """
  if metric == 'low_rank' and not 1 <= rank <= d:
    raise OptionError(
      f'the rank of a low_rank metric must be from 1 to {d}, the dimensions of a head: it is {rank}', rank=rank
    )
  inits = {
    'identity': None,
    'diagonal': lambda _: jnp.ones((heads, d)),
    'low_rank': lambda key: jax.random.normal(key, (heads, rank, d)) / d**0.5,
    'full': lambda _: jnp.tile(jnp.eye(d), (heads, 1, 1)),
    'bilinear': lambda _: jnp.tile(jnp.eye(d), (heads, 1, 1)),
  }
  init = choose('metric', metric, inits)
  return None if init is None else module.param('metric', lambda key: init(key).astype(jnp.float32))
