"""Errors of the fast implementations on this device against float64 on the host, in value and in every gradient."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import THREADS, attempt, filled
from hbf.errors import UserError
from hbf.hardware.hlo import count_kernels
from hbf.models.build import DTYPES
from hbf.ops.basis import RadialBasis
from hbf.ops.fast.attention import attention
from hbf.ops.hyperbf import hyperbf
from hbf.ops.linear_attention import feature_map, linear_attention, orthogonal_projections

Arrays = dict[str, Any]
Operator = Callable[[Arrays], jax.Array]

# Greatest relative error of the value and of each gradient. float32 includes the default rounding of factors, to 10
# bits on GPUs (TF32) and 8 on TPUs. A wrong sum has a larger error.
TOLERANCES = {'float32': 5e-3, 'bfloat16': 3e-2}
ROUNDED = ('points', 'centers', 'coefficients')  # arrays in the checked type; others stay float32
BATCH, HEADS = 2, 2  # sizes of attention


@dataclasses.dataclass(frozen=True)
class Case:
  """An operator in a fast implementation.

  Attributes:
    about: first columns of its row.
    form: the implementation, a function of arrays by name.
    reference: the same function, written from its equations, in the arrays' type.
    arrays: float32 arrays.
  """

  about: dict[str, Any]
  form: Operator
  reference: Operator
  arrays: Arrays


def check(cases: Sequence[Case]) -> list[dict[str, Any]]:
  """Return rows of all cases in every type. A case that does not compile or run reports its error."""
  typed = [(case, dtype) for case in cases for dtype in DTYPES]
  with futures.ThreadPoolExecutor(THREADS) as pool:
    programs = [pool.submit(compile_case, case, dtype) for case, dtype in typed]
    rows = []
    for (case, dtype), program in zip(typed, programs, strict=True):
      about = {**case.about, 'dtype': dtype, 'tolerance': TOLERANCES[dtype], 'within': 'no'}
      rows.append(attempt(about, functools.partial(compare, case, dtype, program)))
  return filled(rows)


def compile_case(case: Case, dtype: str) -> Any:
  """Compile a case's implementation with its gradients."""
  arrays = rounded(case.arrays, dtype)
  return jax.jit(with_gradients(case.form)).lower(arrays, random_target(case.form, arrays)).compile()


def compare(case: Case, dtype: str, program: futures.Future) -> dict[str, Any]:
  """Return the relative errors of the value and of each gradient, and the kernel in use."""
  compiled, arrays = program.result(), rounded(case.arrays, dtype)
  inputs = arrays, random_target(case.form, arrays)
  value, gradients = compiled(*inputs)
  exact_value, exact_gradients = exact(case.reference, *inputs)
  errors = {'value': relative_error(value, exact_value)}
  errors |= {f'd {name}': relative_error(gradients[name], exact_gradients[name]) for name in arrays}
  within = all(error <= TOLERANCES[dtype] for error in errors.values())
  return {'kernel': kernel_of(compiled.as_text()), **errors, 'within': 'yes' if within else 'no'}


def with_gradients(function: Operator) -> Callable[[Arrays, Any], tuple[jax.Array, Arrays]]:
  """Return a function of (arrays, target) that returns the value of `function` and gradients for each array.

  They are the gradients of half the squared distance between the value and the target. The target should be random.
  Otherwise the gradient of an array that affects all outputs may be a sum of large terms that nearly cancel, and
  rounding would spoil it.
  """

  def call(arrays: Arrays, target: Any) -> tuple[jax.Array, Arrays]:
    value, pull = jax.vjp(function, arrays)
    return value, pull(value - target)[0]

  return call


def rounded(arrays: Arrays, dtype: str) -> Arrays:
  """Return the arrays. Those that `ROUNDED` names are converted to the type `dtype`."""
  return {name: z.astype(DTYPES[dtype]) if name in ROUNDED else z for name, z in arrays.items()}


def random_target(form: Operator, arrays: Arrays) -> np.ndarray:
  """Return a random target in the shape and type of the output."""
  value = jax.eval_shape(form, arrays)
  return np.random.default_rng(1).normal(size=value.shape).astype(value.dtype)


def exact(reference: Operator, arrays: Arrays, target: np.ndarray) -> tuple[jax.Array, Arrays]:
  """Return value and gradients in float64, computed on the host."""
  with jax.enable_x64(True), jax.default_device(host()):
    wide = jax.tree.map(lambda z: jnp.asarray(z.astype(np.float64)), (arrays, target))
    return jax.device_get(with_gradients(reference)(*wide))


def host() -> jax.Device:
  """Return the device that computes in float64.

  Raises:
    UserError: JAX_PLATFORMS excludes the CPU.
  """
  try:
    return jax.devices('cpu')[0]
  except RuntimeError:
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    raise UserError(f'the reference needs a CPU beside the accelerator: set JAX_PLATFORMS={platforms},cpu') from None


def relative_error(found: jax.Array, expected: jax.Array) -> float:
  """Return the norm of the difference divided by the norm of the expected array."""
  difference = np.asarray(found).astype(np.float64) - np.asarray(expected)
  return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def kernel_of(text: str) -> str:
  """Return the labels of the external kernels that a compiled program calls, such as 'cuDNN', or 'XLA' for none."""
  return ' + '.join(count_kernels(text)) or 'XLA'


def normal(rng: np.random.Generator, **shapes: tuple[int, ...]) -> Arrays:
  """Return random float32 arrays."""
  return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def attention_cases(head_sizes: Sequence[int], tokens: Sequence[int]) -> Iterator[Case]:
  """Yield cases of softmax attention, and of Gaussian attention with one sigma per head. Both use one kernel."""
  for d, n in itertools.product(head_sizes, tokens):
    about = {'tokens': n, 'centers': n, 'd': d}
    rng = np.random.default_rng(0)
    qkv = normal(rng, **dict.fromkeys(ROUNDED, (BATCH, n, HEADS, d)))
    yield Case({'operator': 'softmax attention', **about}, fast_attention, softmax_attention, qkv)
    heads = normal(rng, **dict.fromkeys(ROUNDED, (BATCH, HEADS, n, d)))
    heads['sigma'] = np.full((HEADS, 1, 1), d**0.25, np.float32)
    unit: dict[str, Any] = {'kernel': 'gaussian', 'normalization': 'sum'}
    form, reference = functools.partial(fast_hyperbf, **unit), functools.partial(naive_hyperbf, **unit)
    yield Case({'operator': 'gaussian attention', **about}, form, reference, heads)


def linear_cases(d: int, n: int) -> Iterator[Case]:
  """Yield cases of linear attention: one head that has as many features as dimensions."""
  projections = orthogonal_projections(np.random.default_rng(0), d, d)
  for features, causal in itertools.product(('elu', 'gaussian'), (False, True)):
    name = f'linear attention, {features}{", causal" if causal else ""}'
    how: dict[str, Any] = {'features': features, 'causal': causal, 'projections': projections}
    yield Case(
      {'operator': name, 'tokens': n, 'centers': n, 'd': d},
      functools.partial(linear, **how),
      functools.partial(naive_linear, **how),
      normal(np.random.default_rng(0), **dict.fromkeys(ROUNDED, (n, d))),
    )


def stage2_cases(form: str, d: int, tokens: Sequence[int], centers: Sequence[int]) -> Iterator[Case]:
  """Yield cases of stage 2 with one sigma per center. Each normalization, kernel and number of centers occurs."""
  few, odd = centers[0], tokens[-1]
  units = [('gaussian', normalization, n, few) for normalization in RESPONSES for n in tokens]
  units += [(kernel, 'layer', odd, few) for kernel in KERNELS if kernel != 'gaussian']
  units += [('gaussian', 'layer', odd, many) for many in centers[1:]]
  for kernel, normalization, n, a in units:
    rng = np.random.default_rng(0)
    arrays = normal(rng, points=(n, d), centers=(a, d), coefficients=(a, d))
    arrays['sigma'] = (d**0.25 * rng.uniform(0.8, 1.2, (1, a))).astype(np.float32)
    arrays['weights'] = rng.uniform(0.8, 1.2, d).astype(np.float32)
    if normalization == 'none':
      arrays['log_gain'] = np.full((1, 1), d**0.5, np.float32)
    unit: dict[str, Any] = {'kernel': kernel, 'normalization': normalization}
    yield Case(
      {'operator': f'hyperbf {form}, {kernel}, {normalization}', 'tokens': n, 'centers': a, 'd': d},
      functools.partial(fast_hyperbf, **unit, metric='diagonal', implementation=form),
      functools.partial(naive_hyperbf, **unit),
      arrays,
    )


def fast_attention(z: Arrays) -> jax.Array:
  """Compute attention, given a dict with the arrays that `ROUNDED` names: queries, keys and values."""
  return attention(*(z[name].swapaxes(1, 2) for name in ROUNDED)).swapaxes(1, 2)


def fast_hyperbf(z: Arrays, implementation: str = 'xla', **names: Any) -> jax.Array:
  """Compute the operator. The dict `z` has points, centers, coefficients and the arrays of its radial basis.

  `names` has the other fields of `RadialBasis`, such as the kernel.
  """
  points, centers, coefficients = (z[name] for name in ROUNDED)
  numbers = {name: value for name, value in z.items() if name not in ROUNDED}
  basis = RadialBasis(**numbers, **names)
  return hyperbf(points, centers, coefficients, basis, implementation=implementation)


def linear(z: Arrays, features: str, causal: bool, projections: np.ndarray) -> jax.Array:
  """Compute linear attention as a stage does, given a dict with the arrays that `ROUNDED` names."""
  sigma = z['points'].shape[-1] ** 0.25
  q, k = (feature_map(z[n], features, projections=jnp.asarray(projections), sigma=sigma) for n in ROUNDED[:2])
  return linear_attention(q, k, z['coefficients'], normalizer='sum', causal=causal)


# The reference equations, without any code of `hbf`.


def softmax_attention(z: Arrays) -> jax.Array:
  """Compute softmax(q·k/√d) v for queries, keys and values [B, N, H, d]."""
  q, k, v = (z[name].swapaxes(1, 2) for name in ROUNDED)
  weights = jnp.exp(q @ k.mT / q.shape[-1] ** 0.5)
  return (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(1, 2)


KERNELS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'gaussian': lambda s: jnp.exp(-s),
  'laplacian': lambda s: jnp.exp(-jnp.sqrt(2 * s)),
  'rational_quadratic': lambda s: 1 / (1 + s),
  'inverse_multiquadric': lambda s: 1 / jnp.sqrt(1 + 2 * s),
}


def _layer(k: jax.Array) -> jax.Array:
  mean = k.mean(-1, keepdims=True)
  return (k - mean) / jnp.sqrt(k.var(-1, keepdims=True) + 1e-6 * mean**2)


RESPONSES: dict[str, Callable[[jax.Array], jax.Array]] = {
  'none': lambda k: k,
  'sum': lambda k: k / k.sum(-1, keepdims=True),
  'rms': lambda k: k / jnp.sqrt(jnp.mean(k**2, -1, keepdims=True)),
  'layer': _layer,
}


def naive_hyperbf(z: Arrays, kernel: str, normalization: str) -> jax.Array:
  """Compute Σ_a R_a(x) c_a under a diagonal metric."""
  x, t = (z.get('weights', 1.0) * z[name] for name in ROUNDED[:2])
  r2 = (x * x).sum(-1)[..., None] + (t * t).sum(-1)[..., None, :] - 2 * x @ t.mT
  k = KERNELS[kernel](r2 / (2 * z['sigma'] ** 2)) * jnp.exp(z.get('log_gain', 0.0))
  return RESPONSES[normalization](k) @ z['coefficients']


def naive_linear(z: Arrays, features: str, causal: bool, projections: np.ndarray) -> jax.Array:
  """Compute Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j) for one head, with q, k and v [N, d]."""

  def phi(x: jax.Array) -> jax.Array:
    if features == 'elu':
      return jnp.where(x > 0, x + 1, jnp.exp(x))
    x = x / x.shape[-1] ** 0.25
    return jnp.exp(x @ projections.T.astype(np.float64) - (x * x).sum(-1, keepdims=True)) / len(projections) ** 0.5

  weights = phi(z['points']) @ phi(z['centers']).mT
  if causal:
    weights = jnp.tril(weights)
  return weights / weights.sum(-1, keepdims=True) @ z['coefficients']
