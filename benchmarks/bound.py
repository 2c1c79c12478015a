"""The time estimate of `hbf compile` against measured times on this device.

python -m benchmarks.bound

The device's rates are those of a square matrix product and of a copy, which run in turn with the other programs. A
product of another shape and a sum show how exact the rates are. A loop over a small array, which stays in a cache,
can be faster than its estimate, so the estimate is not a lower bound. Train steps show how much of their time it
explains.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.common import Thunk, alternate, launch, matmul, parser, ratios, report, spread
from benchmarks.models import CIFAR, make_training, random_batch
from hbf.config.recipes import make_config
from hbf.config.resolve import resolve
from hbf.hardware.bound import bound
from hbf.hardware.chips import Chip
from hbf.hardware.hlo import count_traffic
from hbf.models.flops import PRECISIONS, count_products
from hbf.training.machine import keep_freed_memory

PRODUCT, COPIED = 2048, 2**26  # side of the product and size of the copy that give the device's rates


class Measured(NamedTuple):
  """A program to measure.

  Attributes:
    call: function that runs it once.
    products: operations of its matrix products by precision, see `hbf.models.flops.count_products`.
    memory: bytes that it moves.
  """

  call: Thunk
  products: dict[str, int]
  memory: int


def program(function: Callable, *args: Any) -> Measured:
  """Compile a function of arrays, and return it as a program to measure."""
  traced = jax.jit(function).trace(*args)
  compiled = traced.lower().compile()
  moved = count_traffic(compiled.as_text()).memory
  return Measured(lambda: compiled(*args), count_products(traced.jaxpr.jaxpr), moved)


def forty_steps(numbers: jax.Array) -> jax.Array:
  """Add 1 to an array in each of forty steps of a loop. XLA does not merge these steps."""
  return jax.lax.fori_loop(0, 40, lambda _, z: z + 1, numbers)


def train_step(model: str) -> Measured:
  """Return the train step of a model with recipe small. The step does not donate its state."""
  config = resolve(make_config(f'model={model},recipe=small', {'name': 'cifar10'}))
  _, init, step = make_training(config, CIFAR)
  batch = random_batch(config.train.batch_size, CIFAR)
  return program(step, jax.jit(lambda: init(None, batch))(), None, batch)


def references() -> dict[str, tuple[Thunk, float]]:
  """Return the programs that give the device's rates: a function that runs it, and its operations or bytes."""
  product, operations = matmul(PRODUCT, jnp.float32)
  copy = program(lambda z: z + 1, jnp.zeros(COPIED))
  return {'product': (product, operations), 'copy': (copy.call, copy.memory)}


def rates(seconds: Mapping[str, Sequence[float]], programs: Mapping[str, tuple[Thunk, float]]) -> tuple[float, float]:
  """Return the operations a second and the bytes a second of the `references`, from the seconds of their runs."""
  rate, bandwidth = (statistics.median(amount / s for s in seconds[name]) for name, (_, amount) in programs.items())
  return rate, bandwidth


def main() -> None:
  """Print a row for every program."""
  flags = parser(__doc__.splitlines()[0])
  options = flags.parse_args()
  keep_freed_memory()
  known = references()
  programs = {
    'product, 1024 × 4096 × 1024': program(jnp.matmul, jnp.ones((1024, 4096)), jnp.ones((4096, 1024))),
    'sum of two arrays of 64 MB': program(jnp.add, jnp.zeros(2**24), jnp.zeros(2**24)),
    'forty steps on 8 MB': program(forty_steps, jnp.zeros(2**21)),
    **{f'train step, {model}': train_step(model) for model in ('hyperbf', 'vit')},
  }
  calls = {name: call for name, (call, _) in known.items()} | {name: it.call for name, it in programs.items()}
  seconds = alternate(calls, options.rounds)
  rate, bandwidth = rates(seconds, known)
  chip = Chip(
    name='this',
    kind='this device',
    platform=jax.default_backend(),
    flops=dict.fromkeys(PRECISIONS, rate),
    memory_bytes=0,
    memory_bandwidth=bandwidth,
    network=1.0,
  )
  rows = []
  for name, it in programs.items():
    estimate = bound(chip, it.products, it.memory)
    rows.append(
      {
        'program': name,
        'GFLOP in products': sum(it.products.values()) / 1e9,
        'GB moved': it.memory / 1e9,
        'estimate, ms': 1e3 * estimate.seconds,
        'limit': estimate.limit,
        'measured, ms': 1e3 * statistics.median(seconds[name]),
        'measured / estimate': spread(ratios(seconds[name], [estimate.seconds] * len(seconds[name]))),
      }
    )
  found = f'{rate / 1e9:,.0f} GFLOP/s, {bandwidth / 1e9:,.1f} GB/s'
  report('bound', f'Estimates and times, float32, from rates of {found}', rows, options.out)


if __name__ == '__main__':
  launch(main)
