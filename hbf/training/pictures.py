"""Histograms of parameters and pictures of training images, for the loggers of a run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from hbf.data.pipeline.inputs import Batch
from hbf.data.pipeline.order import step_keys
from hbf.tasks.images import ImageTask
from hbf.training.experiment import Experiment
from hbf.training.loggers import LOGGERS, Histogram, check_loggers
from hbf.training.sharding import replicated

BINS = 64
IMAGES = 16  # the first images of the first batch

Histograms = Callable[[Any], dict[str, Histogram]]


def wants_pictures(experiment: Experiment) -> bool:
  """Return True if a logger of the run takes histograms and images."""
  return any(LOGGERS[name].takes_pictures for name in check_loggers(experiment.config.log.to))


def make_histograms(experiment: Experiment) -> Histograms:
  """Return a function from parameters to their histograms, by the path of the parameter. Devices count the values."""

  def count(values: jax.Array) -> Histogram:
    return Histogram(*jnp.histogram(values.astype(jnp.float32), BINS))

  program = jax.jit(lambda params: jax.tree.map(count, params), out_shardings=replicated(experiment.mesh))

  def histograms(params: Any) -> dict[str, Histogram]:
    with jax.set_mesh(experiment.mesh):
      return flatten_dict(jax.device_get(program(params)), sep='/')

  return histograms


def training_images(experiment: Experiment, stack: Batch) -> np.ndarray | None:
  """Return the first n ≤ IMAGES images of step 1, after the augmentation, uint8 [n, H, W, C].

  Return None if the examples are not images, or have neither 1 nor 3 channels.

  Args:
    experiment: the run.
    stack: several batches, stacked along a new first axis. The first one is the batch of step 1.
  """
  task = experiment.objective.task
  if not isinstance(task, ImageTask) or task.shape[-1] not in (1, 3):
    return None

  def images(resident: Any, stack: Batch) -> jax.Array:
    batch = jax.tree.map(lambda z: z[0], stack)
    keys, _ = step_keys(experiment.objective.seed, jnp.zeros((), jnp.int32))
    inputs = task.train_batch(keys, resident, batch | {'step': jnp.zeros((), jnp.int32)}).inputs
    levels = inputs[:IMAGES] * jnp.asarray(task.std) + jnp.asarray(task.mean)
    return jnp.round(255 * jnp.clip(levels, 0, 1)).astype(jnp.uint8)

  with jax.set_mesh(experiment.mesh):
    program = jax.jit(images, out_shardings=replicated(experiment.mesh))
    return np.asarray(program(experiment.inputs['train'].resident, stack))
