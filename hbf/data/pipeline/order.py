"""The order of examples, and the random keys of a step: pure functions of the run's seed and the index of the step.

So the index of the step is the whole state of the input, and a resumed run gets the same examples as an
uninterrupted run.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np


@functools.lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, examples: int) -> np.ndarray:
  """Return a pseudo-random permutation of range(examples), int32 [examples]. It depends on the arguments only.

  Calls with equal arguments return the same array object, which is read-only.
  """
  # NumPy's `Generator.permutation` may differ between versions. The raw numbers of Philox do not.
  generator = np.random.Philox(key=np.array([seed % 2**64, epoch], np.uint64))
  order = np.argsort(generator.random_raw(examples), kind='stable').astype(np.int32)
  order.flags.writeable = False
  return order


def evenly_spaced(examples: int, most: int) -> np.ndarray:
  """Return min(examples, most) evenly spaced indices of examples, int64."""
  count = min(examples, most)
  return np.arange(count) * examples // max(count, 1)


def step_keys(seed: int, step: Any) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
  """Return the random keys of a step: two for its batch, and one for dropout.

  The first two are the argument `keys` of `hbf.tasks.task.TaskLoss.train_batch`.

  Args:
    seed: the seed of the run.
    step: index of the step, an int or a traced int32.
  """
  example_key, dropout_key, batch_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), step), 3)
  return (example_key, batch_key), dropout_key


@dataclasses.dataclass(frozen=True)
class TrainOrder:
  """An endless stream of shuffled epochs, cut into batches.

  The stream is one permutation of the n examples for each epoch. Position p of the stream is element p % n of the
  permutation of epoch p // n. A batch may extend over several epochs, so no example is dropped.

  Attributes:
    seed: seed of the permutations.
    examples: number of examples in an epoch, at least 1.
    batch_size: number of examples in a step.
  """

  seed: int
  examples: int
  batch_size: int

  def __call__(self, step: int) -> np.ndarray:
    """Return the indices of the examples in step `step`, int32 [batch_size]."""
    positions = step * self.batch_size + np.arange(self.batch_size, dtype=np.int64)
    epochs, offsets = np.divmod(positions, self.examples)
    indices = np.empty(self.batch_size, np.int32)
    for epoch in range(epochs[0], epochs[-1] + 1):
      rows = epochs == epoch
      indices[rows] = permutation(self.seed, epoch, self.examples)[offsets[rows]]
    return indices

  def epochs(self, step: Any) -> Any:
    """Return the index of the epoch that each example of a step belongs to, int32 [batch_size].

    Args:
      step: index of the step, an int or a traced int32.
    """
    # The product step · batch_size may exceed 32 bits. The loop computes its quotient and remainder bit by bit.
    whole, rest = step // self.examples, step % self.examples
    epoch, offset = 0, 0
    for bit in map(int, f'{self.batch_size:b}'):
      epoch, offset = 2 * epoch + bit * whole, 2 * offset + bit * rest
      epoch, offset = epoch + offset // self.examples, offset % self.examples
    return epoch + (offset + np.arange(self.batch_size, dtype=np.int32)) // self.examples


# The permutations of the classes, which are many but small. `permutation` itself keeps two large ones.
_class_permutation = functools.lru_cache(maxsize=4096)(permutation.__wrapped__)

# Numbers of permutations, which differ from the epochs of `TrainOrder` and from one another.
_BLOCKS, _CLASSES = 2**62, 2**63


@dataclasses.dataclass(frozen=True, eq=False)
class BalancedOrder:
  """An endless stream of examples in which all classes are equally frequent, cut into batches.

  The stream consists of blocks. A block has one example of every class, in a shuffled order. A class of n examples is
  shuffled anew after every n blocks, so its examples are equally frequent too.

  Attributes:
    seed: seed of the permutations.
    groups: indices of the examples of each class, int32 [n] with n ≥ 1. Classes without examples are left out.
    batch_size: number of examples in a step.
  """

  seed: int
  groups: tuple[np.ndarray, ...]
  batch_size: int

  @classmethod
  def from_labels(cls, seed: int, labels: np.ndarray, batch_size: int) -> 'BalancedOrder':
    """Return the order of examples whose class numbers are `labels`, int [examples]."""
    groups = (np.flatnonzero(labels == label).astype(np.int32) for label in np.unique(labels))
    return cls(seed, tuple(groups), batch_size)

  def __call__(self, step: int) -> np.ndarray:
    """Return the indices of the examples in step `step`, int32 [batch_size]."""
    first = step * self.batch_size
    found = (divmod(position, len(self.groups)) for position in range(first, first + self.batch_size))
    return np.array([self._example(block, place) for block, place in found], np.int32)

  def _example(self, block: int, place: int) -> int:
    label = int(_class_permutation(self.seed, _BLOCKS + block, len(self.groups))[place])
    group = self.groups[label]
    epoch, offset = divmod(block, len(group))
    return int(group[_class_permutation(self.seed, _CLASSES + (label << 32) + epoch, len(group))[offset]])


@dataclasses.dataclass(frozen=True)
class EvalOrder:
  """An order in which every example comes once, sorted by its index. The last batch is padded with −1.

  Attributes:
    examples: number of examples.
    batch_size: number of rows of every batch.
  """

  examples: int
  batch_size: int

  def __call__(self, step: int) -> np.ndarray:
    """Return the indices of the examples in batch `step`, int32 [batch_size], −1 beyond the last example."""
    indices = step * self.batch_size + np.arange(self.batch_size, dtype=np.int64)
    return np.where(indices < self.examples, indices, -1).astype(np.int32)

  def __len__(self) -> int:
    """Return the number of batches."""
    return -(-self.examples // self.batch_size)
