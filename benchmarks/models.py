"""Train steps of any model on random images, by the code of the training loop."""

import dataclasses
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from benchmarks.common import matmul_flops
from hbf.config.recipes import make_config
from hbf.config.resolve import resolve
from hbf.data.datasets import Dataset
from hbf.data.pipeline.inputs import Batch, Resident
from hbf.tasks.classification import Classification
from hbf.training.durations import Clock
from hbf.training.experiment import make_objective
from hbf.training.optimizer import make_optimizer, make_schedule
from hbf.training.programs import with_extras, with_options
from hbf.training.state import Step, TrainState, init_state, make_train_step

Shape = tuple[int, int, int]  # height, width and channels of an image
CIFAR: Shape = (32, 32, 3)
CLASSES = 10
EMPTY: Mapping[str, Any] = types.MappingProxyType({})


@dataclasses.dataclass
class Trainer:
  """A model in training. A call takes a step.

  Attributes:
    step: the compiled step.
    state: state before the next step.
    batch: images and labels.
    flops: operations of the matrix products of a step, three times those of the forward pass.
    compile_seconds: seconds of lowering and compilation.
    temporary_bytes: bytes of the compiled step beside its arguments and results.
  """

  step: Any
  state: TrainState
  batch: dict[str, jax.Array]
  flops: float
  compile_seconds: float
  temporary_bytes: int

  @property
  def parameters(self) -> int:
    """Number of learned parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(self.state.params))

  def __call__(self) -> jax.Array:
    """Take a step and return the array to wait for."""
    self.state = self.step(self.state, None, self.batch)
    return self.state.step


def make_trainer(
  model: str,
  width: int,
  depth: int,
  heads: int,
  hidden: int,
  batch: int,
  recipe: str = 'memo',
  data: Mapping[str, Any] = EMPTY,
  **keys: Any,
) -> Trainer:
  """Return a model of these sizes with its train step, compiled on random images of CIFAR's shape.

  Args:
    model: name as in a config.
    width: width of the tokens.
    depth: number of blocks.
    heads: heads of stage 1.
    hidden: hidden units or centers of stage 2. A model with other stages has as many units as it has with this
      `model.expansion`.
    batch: images in a step.
    recipe: name of the recipe, which sets all other options.
    data: further keys of the config's data part.
    **keys: further keys of the config's model part, such as dtype.
  """
  config = make_config(f'model={model},recipe={recipe}', {'name': 'cifar10', **data}).unlock()
  config.model.update(width=width, depth=depth, heads=heads, expansion=hidden / width, **keys)
  return compile_trainer(resolve(config), CIFAR, batch)


def compile_trainer(config: ConfigDict, shape: Shape, batch: int) -> Trainer:
  """Return the trainer of a complete config, for images of this shape."""
  model, init, train_step = make_training(config, shape)
  examples = random_batch(batch, shape)
  state = jax.jit(lambda: init(None, examples))()
  images = jax.ShapeDtypeStruct((batch, *shape), jnp.float32)
  forward = matmul_flops(lambda p, x: model.apply({'params': p}, x, train=False), state.params, images)
  step = jax.jit(train_step, donate_argnums=0)
  begin = time.perf_counter()
  compiled = step.lower(state, None, examples).compile()
  seconds = time.perf_counter() - begin
  memory: Any = compiled.memory_analysis()
  return Trainer(compiled, state, examples, 3 * forward, seconds, memory.temp_size_in_bytes)


def make_training(
  config: ConfigDict, shape: Shape
) -> tuple[nn.Module, Callable[[Resident, Batch], TrainState], Step]:
  """Return the model, a function from (resident, batch) to its initial state, and the step that training compiles.

  The images have the given shape and belong to `CLASSES` classes, whatever the config's data set is.
  """
  config = config.copy_and_resolve_references()
  config.data.update(mean=(0.5,) * shape[-1], std=(0.25,) * shape[-1])
  task = Classification.from_config(config, Dataset('random', tuple(map(str, range(CLASSES))), shape, {}))
  model, objective = task.make_model(config.model), make_objective(config, task, parts=config.train.accumulate or 1)
  clock = Clock(50_000, config.train.batch_size, 1.0)
  optimizer = make_optimizer(config.optimizer, make_schedule(config.optimizer, clock))

  def init(resident: Resident, examples: Batch) -> TrainState:
    return with_extras(init_state(model, optimizer, objective, resident, examples), config)

  return model, init, with_options(make_train_step(model, optimizer, objective), config)


def random_batch(batch: int, shape: Shape) -> dict[str, jax.Array]:
  """Return random images [batch, *shape] and labels in the form of a stream's batch."""
  random = np.random.default_rng(0)
  images = random.integers(0, 256, (batch, *shape), np.uint8)
  labels = random.integers(0, CLASSES, batch, np.int32)
  return {'index': jnp.arange(batch), 'image': jnp.asarray(images), 'label': jnp.asarray(labels)}
