"""What tests of runs share."""

import contextlib
import os
import signal

import jax
import numpy as np
from rich.console import Console

from hbf.models.build import abstract_params
from hbf.training.checkpoints import Checkpoints
from hbf.training.experiment import make_plan
from hbf.training.reporter import Reporter
from hbf.training.restore import restore
from hbf.training.workdir import claim
from hbf.training.writers import read_metrics

ONE = jax.devices()[:1]
# Much that is drawn for an image; RandAugment takes long to compile.
EVERYTHING = {
  'data.transforms': (('flip',), ('shift', 1), ('erase', 0.25)),
  'data.mix': (('mixup', 0.8, 0.4), ('cutmix', 1.0, 0.4)),
}
QUIET = Console(quiet=True)
TIMES = ('images_per_second', 'tokens_per_second', 'seconds')


def stop_at(patch, stop):
  """Let this process receive SIGTERM when step `stop` is reported."""
  report = Reporter.report

  def reporting(self, step, state):
    if step == stop:
      os.kill(os.getpid(), signal.SIGTERM)
    return report(self, step, state)

  patch.setattr(Reporter, 'report', reporting)


def params_of(workdir, average=False):
  """Return the parameters of the newest checkpoint, or their average, on the host."""
  return jax.tree.map(np.asarray, restore(workdir, 'latest', ONE, average).params)


def save_untrained(config, folder, scale=0.0, seed=0):
  """Write a run folder with one checkpoint, of random parameters times `scale`."""
  plan, random = make_plan(config), np.random.default_rng(seed)
  folder.mkdir()
  claim(folder, plan.config, plan.task.identity())
  shapes = abstract_params(plan.model, plan.task.shape)
  params = jax.tree.map(lambda shape: jax.numpy.asarray(scale * random.normal(size=shape.shape), shape.dtype), shapes)
  with contextlib.closing(Checkpoints(folder / 'checkpoints')) as checkpoints:
    checkpoints.save_params(1, params)


def timeless(workdir):
  """Return the lines of the log without times."""
  return [{key: value for key, value in line.items() if key not in TIMES} for line in read_metrics(workdir)]


def assert_same_run(first, second):
  """Assert that two runs have bit-identical parameters and averages, and the same metrics."""
  for average in (False, True):
    jax.tree.map(np.testing.assert_array_equal, params_of(first, average), params_of(second, average))
  assert timeless(first) == timeless(second)


def assert_timed(result, config, steps):
  """Assert that the time and speed in a result are those of `steps` steps, up to rounding."""
  seconds = steps * config.train.batch_size / result['images_per_second']
  assert abs(result['train_seconds'] - seconds) < 0.006


def damage(folder, step, count=2):
  """Cut the largest files of a checkpoint in half."""
  files = sorted((path for path in (folder / str(step)).rglob('*') if path.is_file()), key=lambda p: p.stat().st_size)
  for path in files[-count:]:
    os.truncate(path, path.stat().st_size // 2)
