"""Time and temporary memory of stage 2 alone: the fast implementations against the plain one.

python -m benchmarks.operator                                   # implementation xla; on a TPU also pallas
python -m benchmarks.operator --forms xla,pallas --tokens 256 --centers 512 --rounds 2

Temporary memory is the compiled program's request. On a CPU it leaves out allocations inside XLA's library fusions.
The plain forward pass can be one such fusion. It then seems to need no memory for its responses, but it does.
"""

import functools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import Thunk, alternate, compiled, launch, names, parser, positive, ratios, report, spread
from hbf.models.build import DTYPES
from hbf.ops.api import KERNELS, NORMALIZATIONS
from hbf.ops.basis import RadialBasis
from hbf.ops.fast.choice import IMPLEMENTATIONS
from hbf.ops.hyperbf import hyperbf, hyperbf_plain
from hbf.training.machine import keep_freed_memory


def main() -> None:
  """Print two rows for every normalization and implementation: without and with the backward pass.

  Ratios are to implementation plain.
  """
  flags = parser(__doc__)
  flags.set_defaults(rounds=5)
  flags.add_argument('--tokens', type=positive, default=4096)
  flags.add_argument('--centers', type=positive, default=8192)
  flags.add_argument('--width', type=positive, default=192, help='width of the tokens')
  flags.add_argument('--normalizations', default='layer,sum,none', type=names('normalization', NORMALIZATIONS))
  flags.add_argument('--kernel', default='gaussian', choices=KERNELS)
  flags.add_argument('--dtype', default='float32', choices=DTYPES)
  flags.add_argument(
    '--forms',
    default='xla,pallas' if jax.default_backend() == 'tpu' else 'xla',
    type=names('implementation', IMPLEMENTATIONS),
    help='implementations; pallas is for TPUs, and a CPU interprets it, which is slow',
  )
  options = flags.parse_args()
  keep_freed_memory()
  arrays = make_arrays(options.tokens, options.centers, options.width, DTYPES[options.dtype])
  rows = []
  for normalization in options.normalizations:
    unit = {'kernel': options.kernel, 'metric': 'diagonal', 'normalization': normalization}
    functions: dict[str, Callable] = {'plain': hyperbf_plain}
    functions |= {form: functools.partial(hyperbf, implementation=form) for form in options.forms}
    forms = {form: functools.partial(by_name, function, **unit) for form, function in functions.items()}
    rows += measure(normalization, forms, arrays, options.rounds)
  sizes = f'{options.tokens} tokens, {options.centers} centers, width {options.width}, {options.dtype}'
  report('operator', f'Stage 2, {options.kernel}: {sizes}', rows, options.out)


def make_arrays(tokens: int, centers: int, width: int, dtype: Any) -> dict[str, jax.Array]:
  """Return arguments like a new stage's: a sigma per center, σ² = √D, and a gain near 1 / mean response."""
  keys = jax.random.split(jax.random.key(0), 3)
  arrays = {
    name: jax.random.normal(key, (n, width), dtype)
    for name, key, n in zip(('points', 'centers', 'coefficients'), keys, (tokens, centers, centers), strict=True)
  }
  sigma = jnp.full((1, centers), width**0.25)
  return arrays | {'sigma': sigma, 'weights': jnp.ones(width), 'log_gain': jnp.full((1, 1), width**0.5)}


def by_name(
  function: Callable, points: jax.Array, centers: jax.Array, coefficients: jax.Array, **basis: Any
) -> jax.Array:
  """Compute the operator under the radial basis that the keywords define."""
  return function(points, centers, coefficients, RadialBasis(**basis))


def measure(
  normalization: str, forms: Mapping[str, Callable], arrays: dict[str, jax.Array], rounds: int
) -> list[dict[str, Any]]:
  """Return the rows of one normalization: each implementation without and with the backward pass.

  All of them run in turn.
  """
  thunks: dict[str, Thunk] = {}
  temporary: dict[str, int] = {}
  for form, function in forms.items():
    for direction, call in (('forward', unpacked(function)), ('forward+backward', with_gradient(function))):
      name = f'{direction} {form}'
      thunks[name], temporary[name] = compiled(call, arrays)
  seconds = alternate(thunks, rounds)
  rows = []
  for name in sorted(thunks, key=lambda name: name.split()[0]):
    direction, form = name.split()
    plain = f'{direction} plain'
    rows.append(
      {
        'normalization': normalization,
        'direction': direction,
        'form': form,
        'ms': 1e3 * statistics.median(seconds[name]),
        'time / plain': spread(ratios(seconds[name], seconds[plain])),
        'temporary MB': temporary[name] / 1e6,
        'memory / plain': temporary[name] / max(temporary[plain], 1),
      }
    )
  return rows


def unpacked(function: Callable) -> Callable:
  """Return a function that takes the arguments of `function` as a dict."""
  return lambda arrays: function(**arrays)


def with_gradient(function: Callable) -> Callable:
  """Return a function that takes the arguments as a dict. It returns the output's sum of squares with gradients."""
  return jax.value_and_grad(lambda arrays: jnp.sum(jnp.square(function(**arrays).astype(jnp.float32))))


if __name__ == '__main__':
  launch(main)
