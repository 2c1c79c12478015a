"""Linear attention: convergence of random features, and the number of tokens from which it is the faster way.

python -m benchmarks.linear
python -m benchmarks.linear --parts time --lengths 64,1024 --width 64 --heads 2 --rounds 1

Errors are relative errors of the outputs at σ² = √d, as in a new block. They fall with the square root of the number
of features (exponent −1/2) once this number is well above exp(2 s² √d). Here d is the head size, and s the standard
deviation of normal queries and keys, which is 1 in a new block. Times are of stage 1 alone on one image, forward.
Temporary memory is that for the greatest number of tokens. Exponents are fitted to the three greatest sizes.
"""

import argparse
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import Thunk, compiled, launch, names, numbers, parser, positive, report
from benchmarks.growth import Case, make_stage1, measure
from hbf.nn.baselines.linear_attention import LinearAttention
from hbf.nn.context import EVALUATION, Context
from hbf.ops.basis import RadialBasis
from hbf.ops.hyperbf import hyperbf
from hbf.ops.linear_attention import feature_map, linear_attention, orthogonal_projections
from hbf.training.machine import keep_freed_memory

SIZES = {'lengths': '64,256,1024,4096,16384', 'features': '16,64,256,1024,4096'}
# Head sizes, and standard deviations of queries and keys. They determine how many features are enough.
DIMENSIONS, DEVIATIONS = (16, 64), (0.25, 0.5, 1.0)
EXACT_STAGES = ('hyperbf', 'softmax')
TOKENS = 256  # tokens in the convergence part
SEEDS = 5


def main() -> None:
  """Print a table for every part."""
  flags = parser(__doc__)
  flags.set_defaults(rounds=3)
  flags.add_argument('--parts', default=','.join(PARTS), type=names('part', PARTS))
  for name, default in SIZES.items():
    flags.add_argument(f'--{name}', default=default, type=sizes, help='three or more')
  flags.add_argument('--width', type=positive, default=192, help='width of the timed tokens')
  flags.add_argument('--heads', type=positive, default=3)
  options = flags.parse_args()
  keep_freed_memory()
  for part in options.parts:
    title, rows = PARTS[part](options)
    report(f'linear-{part}', title, rows, options.out and options.out.with_stem(f'{options.out.stem}-{part}'))


def sizes(text: str) -> list[int]:
  """Parse the sizes of a flag, and return them in increasing order. An exponent is fitted to three of them."""
  found = sorted(set(numbers(text)))
  if len(found) < 3:
    raise argparse.ArgumentTypeError(f'{text}: expected three different sizes or more')
  return found


Part = tuple[str, list[dict[str, Any]]]  # title and rows


def convergence(options: argparse.Namespace) -> Part:
  """Return mean relative errors by feature map, head size, deviation and number of features, with their exponents."""
  rows = []
  for name, d, deviation in itertools.product(EXACT, DIMENSIONS, DEVIATIONS):
    errors = [mean_error(name, d, deviation, count) for count in options.features]
    row = {'map': name, 'dimensions': d, 'deviation': deviation}
    row |= {f'm = {count:,}': error for count, error in zip(options.features, errors, strict=True)}
    rows.append(row | {'exponent': exponent(options.features, errors)})
  return f'Relative error of random features, {TOKENS} tokens, {SEEDS} draws', rows


def mean_error(name: str, d: int, deviation: float, count: int) -> float:
  """Return ‖approximation − exact‖ / ‖exact‖ of one head, averaged over draws of the projections."""
  q, k, v = jax.random.normal(jax.random.key(0), (3, TOKENS, d))
  arrays = deviation * q, deviation * k, v
  approximation = jax.jit(functools.partial(by_features, name))
  expected = EXACT[name](*arrays)
  draws = (orthogonal_projections(np.random.default_rng(seed), count, d) for seed in range(SEEDS))
  errors = [jnp.linalg.norm(approximation(omega, *arrays) - expected) for omega in draws]
  return float(np.mean(errors) / jnp.linalg.norm(expected))


def by_features(name: str, projections: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """Return the approximation [N, d] by random features, at the initial σ² = √d of HyperBF attention."""
  queries, keys = (feature_map(z, name, projections=projections, sigma=z.shape[-1] ** 0.25) for z in (q, k))
  return linear_attention(queries, keys, v, normalizer='sum', causal=False)


def softmax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """Compute the softmax attention [N, d] of one head."""
  return jax.nn.softmax(q @ k.T / q.shape[-1] ** 0.5) @ v


def gaussian(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """Compute the HyperBF attention [N, d] of one head."""
  return hyperbf(q, k, v, RadialBasis('gaussian', q.shape[-1] ** 0.25))


EXACT = {'softmax': softmax, 'gaussian': gaussian}


def times(options: argparse.Namespace) -> Part:
  """Return the milliseconds of each stage 1, and the number of tokens from which it is faster than HyperBF."""
  measured: dict[str, list[dict[str, Any]]] = {}
  for row in measure(list(cases(options)), options.rounds):
    measured.setdefault(row['part'], []).append(row)
  exact, rows = [row['ms'] for row in measured['hyperbf']], []
  for series, sizes in measured.items():
    milliseconds = [row['ms'] for row in sizes]
    row = {'stage 1': series} | {f'{size["size"]:,} tokens': size['ms'] for size in sizes}
    row |= {'exponent': exponent(options.lengths, milliseconds), 'MB': sizes[-1]['temporary MB']}
    linear = series not in EXACT_STAGES
    rows.append(row | {'faster than hyperbf from': crossover(options.lengths, milliseconds, exact) if linear else ''})
  return f'Milliseconds of stage 1, one image, forward, width {options.width}, {options.heads} heads, float32', rows


PARTS = {'convergence': convergence, 'time': times}


def cases(options: argparse.Namespace) -> Iterator[Case]:
  """Yield a case for every stage 1 and number of tokens.

  With head size d, linear attention has m = d features for map elu, and m = d or 4 d random features for gaussian.
  """
  d = options.width // options.heads
  stages = {name: (make_stage1(name, options.heads, options.width), EVALUATION) for name in EXACT_STAGES}
  for context in (EVALUATION, Context(causal=True)):
    suffix = ', causal' if context.causal else ''
    for name, features in (('elu', d), ('gaussian', d), ('gaussian', 4 * d)):
      module = LinearAttention(options.heads, name, features, normalizer='sum')
      stages[f'{name}, m = {features}{suffix}'] = module, context
  for series, stage in stages.items():
    for length in options.lengths:
      yield Case(series, 'tokens', length, *forward(*stage, (1, length, options.width)))


def forward(module: nn.Module, context: Context, shape: tuple[int, int, int]) -> tuple[Thunk, int]:
  """Return a thunk that runs a stage on random tokens [B, N, D], and its temporary memory."""
  tokens = jax.random.normal(jax.random.key(0), shape)
  params = jax.jit(module.init)(jax.random.key(1), tokens[:, :64])
  return compiled(functools.partial(module.apply, context=context), params, tokens)


def exponent(sizes: list[int], values: list[float]) -> float:
  """Return the exponent p in values ~ size^p, by least squares of the logarithms at the three greatest sizes."""
  return round(float(np.polyfit(np.log(sizes[-3:]), np.log(values[-3:]), 1)[0]), 2)


def crossover(lengths: list[int], linear: list[float], exact: list[float]) -> str:
  """Return the number of tokens from which `linear` stays below `exact`, interpolated in logarithms."""
  gains = np.log(np.divide(exact, linear))
  slower = np.flatnonzero(gains <= 0)
  if not len(slower):
    return f'below {lengths[0]}'
  last = slower[-1]
  if last == len(lengths) - 1:
    return 'never here'
  low, high = np.log(lengths[last : last + 2])
  return f'{math.exp(low + (high - low) * -gains[last] / (gains[last + 1] - gains[last])):,.0f}'


if __name__ == '__main__':
  launch(main)
