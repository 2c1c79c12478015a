"""Record the results of every shipped config bit by bit, and check changed code against the record.

python -m benchmarks.behavior --check                        # after a move or a rename: no bit may differ
python -m benchmarks.behavior --check --only 'cifar10-vit-*'
python -m benchmarks.behavior --record --only NAME           # after an intended change of behavior

The record holds the losses of 20 training steps, and the logits of fixed inputs before and after them. Images and
texts are random, batches are small, and one core computes. Bits depend on the CPU and on the versions of JAX and its
libraries. If these differ from those of the record, numbers are compared with a tolerance. Names of modules and
parameters have no influence (`ignore_names`). Differences are listed in the order of computation.
"""

import argparse
import base64
import contextlib
import fnmatch
import itertools
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import flax.core.scope
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from hbf.config.command_line import read_config
from hbf.data.datasets import Dataset
from hbf.data.images.arrays import ArraySource
from hbf.data.pipeline.order import EvalOrder
from hbf.data.text.texts import Texts
from hbf.data.text.tokenizers import learn_tokenizer
from hbf.errors import UserError, in_one_line
from hbf.training.experiment import prepare
from hbf.training.machine import keep_compiled_programs, keep_freed_memory, versions
from hbf.training.programs import jit_steps, make_init
from hbf.training.state import Totals
from hbf.training.workdir import replace_text
from tests.test_golden_configs import GOLDEN

Arrays = dict[str, np.ndarray]

RECORD = pathlib.Path(__file__).with_suffix('.json')
# For these, 20 steps would take minutes on one core. Only the logits of fresh parameters are recorded.
TOO_LARGE = ('imagenet-hyperbf', 'imagenet-vit', 'imagenet-hyperbf-size-large')
STEPS, BATCH, SHOWN = 20, 4, 2
TRAIN, HELD_OUT, TEST = 40, 10, 4  # examples. The steps are two epochs, whose orders differ
TOKENS = 16  # the logits of every 16th token of a text are kept
OVERRIDES = {
  'train.batch_size': BATCH,
  'train.epochs': STEPS * BATCH / TRAIN,
  'data.validation': HELD_OUT / (TRAIN + HELD_OUT),
}
IMAGES = {  # height, width, channels; classes
  'digits': ((8, 8, 1), 10),
  'cifar10': ((32, 32, 3), 10),
  'cifar100': ((32, 32, 3), 100),
  'tiny_imagenet': ((64, 64, 3), 200),
  'image_folder': ((64, 64, 3), 10),
  'imagenet2012': ((224, 224, 3), 1000),
}
CHARACTERS = bytes(range(32, 97))  # 65, as many as in Shakespeare
TOLERANCE = 1e-4  # for other CPUs or versions, relative to the largest number
# For programs that run once and for small ones: compiling takes half the time without LLVM's expensive passes.
QUICKLY: dict[str, Any] = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}
# Two more configs of the record, for a fast test.
TINY = {
  'tiny-images': ('digits.py', '--config.model.depth=1'),
  'tiny-text': ('shakespeare.py:model=vit', '--config.model.depth=1'),
}
CONFIGS = {name: (path,) for name, path in GOLDEN.items()} | TINY
PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'numpy')


def random_data(config: ConfigDict) -> Dataset | Texts:
  """Return random data in the shape of the config's data set, with few examples."""
  generator = np.random.default_rng(0)
  sizes = {'train': TRAIN + HELD_OUT, 'test': TEST}
  if config.task != 'classification':
    length, tokenizer = config.data.length, learn_tokenizer('characters', [CHARACTERS], 0)
    splits = {
      split: generator.integers(0, tokenizer.vocabulary, size * length, np.uint8) for split, size in sizes.items()
    }
    return Texts(config.data.name, tokenizer, splits)
  shape, classes = IMAGES[config.data.name]
  sources = {
    split: ArraySource(
      generator.integers(0, 256, (size, *shape), np.uint8), generator.integers(0, classes, size, np.int64)
    )
    for split, size in sizes.items()
  }
  return Dataset(config.data.name, tuple(map(str, range(classes))), shape, sources)


@contextlib.contextmanager
def ignore_names() -> Iterator[None]:
  """Make numbers independent of the names and the nesting of modules and parameters.

  Flax derives random keys from names. Here the n-th key that a call of the model asks for is derived from n. The norm
  of the gradients is a sum over the parameters, in the order of their names. Here its terms are added in ascending
  order.
  """
  counters: dict[str, Iterator[int]] = {}
  bind = flax.core.scope.bind

  def counted_bind(*args: Any, **kwargs: Any) -> flax.core.Scope:
    counters.clear()
    return bind(*args, **kwargs)

  def make_rng(scope: flax.core.Scope, name: str = 'params') -> jax.Array:
    name = name if scope.has_rng(name) else 'params'
    number = next(counters.setdefault(name, itertools.count()))
    return jax.random.fold_in(scope.rngs[name].rng, number)

  def norm(tree: Any) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.sort(jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)]))))

  with (
    mock.patch.object(flax.core.scope, 'bind', counted_bind),
    mock.patch.object(flax.core.Scope, 'make_rng', make_rng),
    mock.patch.object(optax.tree, 'norm', norm),
  ):
    yield


@ignore_names()
def compute(name: str) -> Arrays:
  """Return the results of a config as float32 arrays, in the order of computation."""
  path, *changes = CONFIGS[name]
  changes += [f'--config.{key}={value}' for key, value in OVERRIDES.items()]
  config = read_config([f'--config=configs/{path}', *changes])
  experiment = prepare(config, devices=jax.devices()[:1], dataset=random_data(config))
  inputs, task, model, mesh = experiment.inputs, experiment.task, experiment.model, experiment.mesh
  train, test = inputs['train'], inputs['test']
  shown = next(test.batches(EvalOrder(len(test), SHOWN), 0, 1))
  first, *others = train.stacks(experiment.order, 0, [1] * STEPS, 1)
  init = make_init(experiment, experiment.objective)

  @jax.jit
  def outputs(params: Any) -> jax.Array:
    logits = model.apply({'params': params}, task.eval_batch(test.resident, shown).inputs, train=False)
    return jnp.asarray(logits).astype(jnp.float32)

  def logits(params: Any) -> np.ndarray:
    found = np.asarray(outputs(params))
    return found[:, ::TOKENS] if found.ndim == 3 else found

  with jax.set_mesh(mesh):
    if name in TOO_LARGE:
      params = jax.jit(lambda *args: init(*args).params, compiler_options=QUICKLY)(train.resident, first, {})
      return {'logits before': logits(params)}
    state = jax.jit(init, compiler_options=QUICKLY)(train.resident, first, {})
    found, losses = {'logits before': logits(state.params)}, []
    jitted = jit_steps(experiment, experiment.objective, mesh, state)
    lowered = jitted.lower(state, train.resident, first, np.int32(1))
    steps = lowered.compile(QUICKLY if name in TINY else None)
    for stack in (first, *others):
      state, _ = steps(state.replace(totals=Totals.zeros()), train.resident, stack, np.int32(1))
      losses.append(np.asarray(state.totals.loss))
    found |= {'losses': np.stack(losses), 'logits after': logits(state.params)}
    return found if state.average is None else found | {'logits of the average': logits(state.average)}


def computed_on() -> dict[str, str]:
  """Return all facts, other than the code, on which the bits of a result may depend."""
  cpu = pathlib.Path('/proc/cpuinfo')
  facts = dict(line.split(':', 1) for line in cpu.read_text().split('\n\n')[0].splitlines()) if cpu.is_file() else {}
  known = {key.strip(): value.strip() for key, value in facts.items()}
  model = [known[key] for key in ('model name', 'cpu family', 'model', 'stepping') if key in known]
  found = versions()
  return {'cpu': ' / '.join(model) or platform.processor()} | {name: found[name] for name in PACKAGES}


def difference(name: str, ours: np.ndarray, theirs: np.ndarray, exact: bool) -> str:
  """Describe the difference of an array from the recorded one. Return '' if there is none."""
  if ours.shape != theirs.shape:
    return f'{name} have shape {ours.shape}, recorded is {theirs.shape}'
  if exact and ours.tobytes() == theirs.tobytes():
    return ''
  gap, most = np.abs(ours - theirs), float(np.abs(theirs).max())
  wrong = ~(gap <= (0 if exact else TOLERANCE * most))  # NaN is wrong too
  if not wrong.any():
    return ''
  place = f' from step {np.argmax(wrong) + 1} on' if name == 'losses' else ''
  return f'{name} differ{place}: {wrong.sum()} of {wrong.size}, by up to {gap.max():.2g} of {most:.3g}'


def encode(array: np.ndarray) -> dict[str, Any]:
  """Return an array for JSON: its shape and its bytes as little-endian float32."""
  return {'shape': array.shape, 'float32': base64.b64encode(array.astype('<f4').tobytes()).decode()}


def decode(found: Mapping[str, Any]) -> np.ndarray:
  """Return the array that was given to `encode`."""
  return np.frombuffer(base64.b64decode(found['float32']), '<f4').reshape(found['shape'])


def read() -> dict[str, Any]:
  """Return the record, or an empty one if there is none."""
  return json.loads(RECORD.read_text()) if RECORD.is_file() else {}


def record(name: str, _: dict[str, Any]) -> str:
  """Put a config's arrays into the record."""
  found = compute(name)
  if not all(np.isfinite(array).all() for array in found.values()):
    raise UserError(f'{name} computes numbers that are not finite, so they cannot be compared later: mend the config')
  everything = read()  # read again, because another process may have recorded other configs
  everything[name] = {'computed on': computed_on(), 'arrays': {key: encode(array) for key, array in found.items()}}
  ordered = {known: everything[known] for known in CONFIGS if known in everything}
  lines = ',\n'.join(f' {json.dumps(known)}: {json.dumps(entry)}' for known, entry in ordered.items())
  replace_text(RECORD, f'{{\n{lines}\n}}\n')
  return ''


def check(name: str, everything: dict[str, Any]) -> str:
  """Compare a config's arrays with the record. Return the differences, or ''."""
  recorded = everything.get(name)
  if recorded is None:
    return f'is not in the record: run python -m benchmarks.behavior --record --only {name}'
  theirs = {key: decode(value) for key, value in recorded['arrays'].items()}
  ours, exact = compute(name), recorded['computed on'] == computed_on()
  if [*ours] != [*theirs]:
    return f'has {", ".join(ours)}; recorded are {", ".join(theirs)}'
  return '; '.join(filter(None, (difference(key, ours[key], theirs[key], exact) for key in theirs)))


def use_one_core() -> None:
  """Compute like training on the CPU, but on one core. The number of threads changes how sums are split."""
  os.environ.pop('XLA_FLAGS', None)
  jax.config.update('jax_platforms', 'cpu')
  if hasattr(os, 'sched_setaffinity'):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
  keep_freed_memory()
  keep_compiled_programs()


@in_one_line
def main() -> int:
  """Record or check configs one after another. Return 1 if one differs."""
  flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  action = flags.add_mutually_exclusive_group(required=True)
  action.add_argument('--record', dest='act', action='store_const', const=record, help=f'write {RECORD.name}')
  action.add_argument('--check', dest='act', action='store_const', const=check, help='exit with 1 if one differs')
  flags.add_argument('--only', default='*', metavar='PATTERN', help='such as cifar10-*-small,tiny-*')
  options = flags.parse_args()
  patterns = options.only.split(',')
  names = [name for name in CONFIGS if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
  if not names:
    raise UserError(f'--only={options.only} matches no config; expected names such as {next(iter(CONFIGS))}')
  use_one_core()
  everything = read()
  others = [name for name in names if name in everything and everything[name]['computed on'] != computed_on()]
  if others and options.act is check:
    print(f'{len(others)} configs were recorded elsewhere. Their numbers are compared with tolerance {TOLERANCE}.')
  wrong = 0
  for name in names:
    begin = time.perf_counter()
    said = options.act(name, everything)
    wrong += bool(said)
    print(f'{name}: {said or "ok"} ({time.perf_counter() - begin:.1f} s)', flush=True)
    jax.clear_caches()
  return int(wrong > 0)


if __name__ == '__main__':
  sys.exit(main())
