"""The radial basis of a HyperBF: its kernel, sigma, metric and normalization."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from hbf.errors import UserError, choose
from hbf.ops.distances import METRICS
from hbf.ops.kernels import DIRECT, KERNELS, SIGNED
from hbf.ops.normalization import NORMALIZATIONS
from hbf.ops.products import sum_dtype


@flax.struct.dataclass
class RadialBasis:
  """All that determines the responses R_a of a HyperBF: kernel, sigma, metric and normalization.

  The object is a JAX pytree. The names and `dot_only_dims` are static fields. Numbers and arrays are leaves.

  Attributes:
    kernel: a name in `KERNELS` or `DIRECT` of `hbf.ops.kernels`, or 'signed_gaussian' (`SIGNED`). Kernels in `DIRECT`
      need normalization 'none'.
    sigma: σ > 0, broadcastable to [..., 1, A]. Every kernel but `SIGNED` needs it.
    beta: β of kernel `SIGNED`, of any sign, broadcastable to [..., 1, A]. It replaces 1/2σ².
    metric: a name of a metric, see `hbf.ops.distances.distances`.
    weights: the parameters of the metric, None for 'identity'.
    normalization: a name in `hbf.ops.normalization.NORMALIZATIONS`.
    log_gain: logarithm of a factor that multiplies all responses, broadcastable to [..., 1, 1]. Only normalization
      'none' uses it.
    squared_radius: b = ρ²/2σ² of a kernel in `hbf.ops.kernels.BALLS`, broadcastable to [..., 1, A].
    dot_only_dims: number of last coordinates that the metric ignores. They enter the distance by a dot product only,
      see `hbf.ops.distances.distances`.
  """

  kernel: str = flax.struct.field(pytree_node=False)
  sigma: jax.Array | float | None = None
  beta: jax.Array | float | None = None
  metric: str = flax.struct.field(pytree_node=False, default='identity')
  weights: jax.Array | None = None
  normalization: str = flax.struct.field(pytree_node=False, default='sum')
  log_gain: jax.Array | float = 0.0
  squared_radius: jax.Array | float = 0.0
  dot_only_dims: int = flax.struct.field(pytree_node=False, default=0)

  def __post_init__(self) -> None:
    """Check the names of the kernel, the metric and the normalization. The method `scale` checks sigma and beta.

    Sigma and beta can't be checked here, because JAX also makes `RadialBasis` objects with placeholders instead of
    arrays.

    Raises:
      UserError: a name is unknown, or the kernel does not work with the metric or the normalization.
    """
    choose('kernel', self.kernel, KERNELS | DIRECT | {SIGNED: None})
    choose('metric', self.metric, METRICS | {'bilinear': None})
    choose('normalization', self.normalization, NORMALIZATIONS)
    if self.kernel in DIRECT and self.normalization != 'none':
      raise UserError(
        f'kernel {self.kernel} can change sign, be 0 or grow, so its responses have no sum to divide by: '
        f'use normalization none, not {self.normalization}'
      )
    if self.kernel == SIGNED and self.metric != 'bilinear':
      # The other metrics clamp distances at 0, and beta may be negative.
      raise UserError(f'kernel {SIGNED} needs metric bilinear, not {self.metric}: change one of them')

  @property
  def log_kernel(self) -> str:
    """The name in `KERNELS` of the function that computes log K from scale · r².

    For kernel `SIGNED` this is 'gaussian', because exp(−β r²) is the Gaussian of β r².
    """
    return 'gaussian' if self.kernel == SIGNED else self.kernel

  def scale(self, dtype: Any) -> jax.Array:
    """Return the factor that multiplies r²: 1/2σ², or β for kernel `SIGNED`.

    Args:
      dtype: type of the points. The factor has the type `sum_dtype(dtype)`.

    Raises:
      UserError: sigma or beta is missing, is out of range, or belongs to another kernel.
    """
    if self.kernel == SIGNED:
      if self.beta is None or self.sigma is not None:
        raise UserError(f'kernel {SIGNED} has no sigma: expected beta and no sigma')
      return jnp.asarray(self.beta, sum_dtype(dtype))
    if self.sigma is None or self.beta is not None:
      raise UserError(f'kernel {self.kernel} needs sigma: expected sigma and no beta. Kernel {SIGNED} takes beta')
    if isinstance(self.sigma, int | float) and self.sigma <= 0:
      raise UserError(f'sigma is {self.sigma}: expected a number above 0. Kernel {SIGNED} takes a beta of any sign')
    return 0.5 / jnp.square(jnp.asarray(self.sigma, sum_dtype(dtype)))
