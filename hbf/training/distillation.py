"""The loss of distillation: a network also learns the answers of a trained network, its teacher (Hinton et al. 2015).

hbf/training/teacher.py loads the teacher's network.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from hbf.data.augment.batches import renormalize
from hbf.data.pipeline.inputs import Resident
from hbf.tasks.task import ModelBatch, TaskLoss

Normalization = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel


class WithTeacher(NamedTuple):
  """The arrays in device memory that a step of distillation needs beside its batch.

  Attributes:
    data: the training data, see `hbf.data.pipeline.inputs`.
    params: the parameters of the teacher.
  """

  data: Resident
  params: Any


@dataclasses.dataclass(frozen=True)
class Distillation:
  """The loss of distillation: (1 − w)·L + w·T²·KL(teacher ‖ student), where L is the loss of the task.

  KL compares the two networks' softmax of logits / T, where T is the temperature. The factor T² keeps the gradient
  about as large at every temperature.

  Attributes:
    model: the network of the teacher.
    weight: w, from 0 to 1.
    temperature: T, above 0.
    ours: mean and deviation with which the run normalizes images. None for texts.
    theirs: mean and deviation with which the teacher's images were normalized. None for texts.
  """

  model: nn.Module
  weight: float
  temperature: float
  ours: Normalization | None = None
  theirs: Normalization | None = None

  def loss(self, task: TaskLoss, params: Any, batch: ModelBatch, logits: jax.Array, loss: jax.Array) -> jax.Array:
    """Return the loss of distillation.

    Args:
      task: the task of the run.
      params: the parameters of the teacher.
      batch: the batch that the student sees. The teacher sees the same images or texts, without dropout.
      logits: the student's logits.
      loss: the loss of the task.
    """
    answers = self.model.apply({'params': params}, self._inputs(batch.inputs), train=False)
    found = task.mean_of(divergence(jnp.asarray(answers), logits, self.temperature), batch.targets)
    return (1 - self.weight) * loss + self.weight * self.temperature**2 * found

  def _inputs(self, inputs: jax.Array) -> jax.Array:
    """Return the student's images, normalized with the mean and deviation of the teacher. Return texts unchanged."""
    if self.ours is None or self.theirs is None:
      return inputs
    return renormalize(inputs, self.ours, self.theirs)


def divergence(teacher: jax.Array, student: jax.Array, temperature: float) -> jax.Array:
  """Return KL(p ‖ q) = Σ p·(log p − log q) in nats, of the softmax p of the teacher and q of the student.

  Args:
    teacher: logits [..., V].
    student: logits [..., V].
    temperature: the number that divides all logits before the softmax.

  Returns:
    A number for each prediction, [...].
  """
  p, q = (jax.nn.log_softmax(logits / temperature) for logits in (teacher, student))
  return jnp.sum(jnp.exp(p) * (p - q), axis=-1)
