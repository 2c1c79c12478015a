"""Which of its classes an image is of."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from hbf.data.augment.batches import augment, normalize
from hbf.data.augment.copies import COPIES, Copies
from hbf.data.augment.entries import Entry
from hbf.data.augment.pairs import mix, read_mix
from hbf.data.augment.transforms import TRANSFORMS, check_size, read_transforms
from hbf.data.datasets import Dataset, load
from hbf.data.images import levels
from hbf.data.images.sources import Source, hold_out
from hbf.data.pipeline.identity import identity
from hbf.data.pipeline.inputs import (
  Batch,
  ImageInput,
  Input,
  Resident,
  abstract_batch,
  abstract_resident,
  gather,
  make_input,
)
from hbf.data.pipeline.order import TrainOrder
from hbf.errors import UserError, choose
from hbf.evaluation.classification import Counts, detail, summarize
from hbf.evaluation.scores import ACCURACY, CLASSIFICATION, Score
from hbf.models.build import build_model
from hbf.tasks.task import ModelBatch, Task


@dataclasses.dataclass(frozen=True)
class Reading:
  """How images come to the devices: keys of a config's `data`.

  Attributes:
    input: as for `hbf.data.pipeline.inputs.make_input`.
    workers: likewise.
    resident_bytes: likewise.
  """

  input: str
  workers: int
  resident_bytes: int


@dataclasses.dataclass(frozen=True)
class Classification(Task):
  """Images of classes.

  The goal of a batch in training is (labels int32 [B], targets [B, classes]: probabilities to be predicted); in
  evaluation (labels int32 [B], mask bool [B], False for padding).

  Attributes:
    dataset: the images.
    reading: how they come to the devices.
    mean: of the channels, in 0..1; () before it is measured.
    std: likewise.
    transforms: of each image in training, as `hbf.data.augment.transforms.read_transforms` gives them.
    mix: of pairs of images, as `hbf.data.augment.mix.read_mix` gives it.
    label_smoothing: probability given to all classes alike.
    seed: picks the order of the examples.
    validation: part of train held out.
    copies: see `Task`.
    stratify: whether every class has the same part of its images held out.
  """

  scores: ClassVar[tuple[Score, ...]] = CLASSIFICATION
  example: ClassVar[str] = 'image'
  unit: ClassVar[str] = 'image'
  shows: ClassVar[str] = 'python -m hbf explain'
  examples: ClassVar[tuple[str, ...]] = ('labels',)

  dataset: Dataset
  reading: Reading
  mean: Sequence[float]
  std: Sequence[float]
  transforms: Sequence[Entry]
  mix: Sequence[Entry]
  label_smoothing: float
  seed: int
  validation: float
  stratify: bool
  copies: Copies | None

  @classmethod
  def of(cls, config: ConfigDict, dataset: Dataset) -> Self:
    """See `Task.of`."""
    data, transforms, pairs = config.data, read_transforms(config.data.transforms), read_mix(config.data.mix)
    check_size(transforms, dataset.image_shape)
    if pairs and config.train.batch_size == 1:
      raise UserError(
        'data.mix needs another image to mix one with: set train.batch_size to 2 or more, or data.mix to ()'
      )
    if bool(data.mean) != bool(data.std):
      raise UserError('give both data.mean and data.std, or neither to have them measured')
    channels = dataset.image_shape[-1]
    for key in ('mean', 'std'):
      if len(data[key]) not in (0, channels):
        raise UserError(
          f'data.{key} is {tuple(data[key])}: expected a number for each channel, and the images of {dataset.name} '
          f'have {channels}; give as many, or () to have them measured'
        )
    reading = Reading(data.input, data.workers, data.resident_bytes)
    mean, std = tuple(data.mean), tuple(data.std)
    smoothing = config.train.label_smoothing
    copies = choose('evaluate.copies', config.evaluate.copies, COPIES)
    drawn = (config.seed, data.validation, data.stratify, copies)
    return cls(dataset, reading, mean, std, transforms, pairs, smoothing, *drawn)

  @classmethod
  def load(cls, config: ConfigDict) -> Dataset:
    """See `Task.load`."""
    data = config.data
    return load(
      name=data.name,
      dir=data.dir,
      root=data.root,
      image_size=data.image_size,
      download=data.download,
      test_split=data.test_split,
    )

  @property
  def shape(self) -> tuple[int, ...]:
    """Height, width, channels."""
    return self.dataset.image_shape

  @property
  def units(self) -> int:
    """An example is an image."""
    return 1

  @property
  def predictions(self) -> int:
    """Its class."""
    return 1

  @property
  def about(self) -> str:
    """See `Task.about`."""
    return f'{len(self.dataset.classes)} classes'

  def identity(self) -> dict[str, Any]:
    """See `hbf.data.pipeline.identity.identity`."""
    return identity(self.dataset)

  def network(self, model: ConfigDict) -> nn.Module:
    """See `hbf.models.build.build_model`."""
    return build_model(model, len(self.dataset.classes))

  def splits(self, validation: float) -> dict[str, Source]:
    """See `Task.splits`; held out are images from all over train."""
    train, held_out = hold_out(self.dataset.splits['train'], validation, self.stratify)
    splits = {'train': train, 'validation': held_out, 'test': self.dataset.splits['test']}
    return {name: source for name, source in splits.items() if len(source)}

  def open(self, source: Source, sharding: NamedSharding) -> ImageInput:
    """See `hbf.data.pipeline.inputs.make_input`."""
    reading = self.reading
    return make_input(reading.input, source, sharding, workers=reading.workers, resident_bytes=reading.resident_bytes)

  def shapes(self, source: Source, sharding: NamedSharding, *leading: int) -> tuple[Resident, Batch]:
    """See `Task.shapes`."""
    reading = self.reading
    resident = abstract_resident(reading.input, len(source), self.shape, sharding, reading.resident_bytes)
    return resident, abstract_batch(resident, self.shape, sharding, *leading)

  def measured(self, config: ConfigDict, train: Input | None) -> ConfigDict:
    """The config with `data.mean` and `data.std`; without images they are 1/2 and 1/4."""
    resolved = config.copy_and_resolve_references()
    if train is None:
      channels = self.shape[-1]
      resolved.data.update(mean=(0.5,) * channels, std=(0.25,) * channels)
    elif not config.data.mean:
      assert isinstance(train, ImageInput)
      resolved.data.mean, resolved.data.std = levels.statistics(*train.sums())
    return resolved

  def eval_batch(self, resident: Resident, batch: Batch) -> ModelBatch:
    """See `Task.eval_batch`."""
    examples = gather(resident, batch)
    return ModelBatch(normalize(examples['image'], self.mean, self.std), (examples['label'], examples['mask']))

  def train_batch(self, keys: tuple[jax.Array, jax.Array], resident: Resident, batch: Batch) -> ModelBatch:
    """Images augmented with the first key, and mixed with the second."""
    examples = gather(resident, batch)
    index, labels = examples['index'], examples['label']
    images = augment(
      keys[0], examples['image'], index, self.transforms, self.mean, *self._time(batch['step'], len(index))
    )
    targets = jax.nn.one_hot(labels, len(self.dataset.classes))
    images, targets = mix(keys[1], images, targets, index, self.mix)
    return ModelBatch(normalize(images, self.mean, self.std), (labels, targets))

  def _time(self, step: jax.Array, batch_size: int) -> tuple[jax.Array, jax.Array] | tuple[()]:
    """Return the key of the run and the epoch of each row of a step, if a transform needs them."""
    if 'epoch' not in {need for name, *_ in self.transforms for need in TRANSFORMS[name].needs}:
      return ()
    # Stratified or not, as many are held out; only the number counts here, and it takes no reading of labels.
    train, _ = hold_out(self.dataset.splits['train'], self.validation, stratify=False)
    order = TrainOrder(self.seed, len(train), batch_size)
    # Steps fold in their number, which never gets so large.
    return jax.random.fold_in(jax.random.key(self.seed), 2**32 - 1), order.epochs(step)

  def loss(self, logits: jax.Array, goal: Any) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy."""
    labels, targets = goal
    correct = jnp.sum(jnp.argmax(logits, axis=-1) == labels, dtype=jnp.int32)
    return optax.softmax_cross_entropy(logits, optax.smooth_labels(targets, self.label_smoothing)).mean(), correct

  def zeros(self) -> Counts:
    """See `Task.zeros`."""
    return Counts.zeros(len(self.dataset.classes))

  def count(self, counts: Counts, logits: jax.Array, goal: Any) -> tuple[Counts, dict[str, jax.Array]]:
    """Keeps `labels` and `predictions`, int32."""
    labels, mask = goal
    kept = {'labels': labels, 'predictions': jnp.argmax(logits, axis=-1).astype(jnp.int32)}
    return counts.add(logits, labels, mask), kept

  def summarize(self, counts: Counts) -> dict[str, Any]:
    """See `hbf.evaluation.classification.summarize`."""
    return summarize(counts)

  def detail(self, counts: Counts) -> dict[str, Any]:
    """See `hbf.evaluation.classification.detail`."""
    return detail(counts)

  @staticmethod
  def outcomes(kept: Mapping[str, np.ndarray]) -> np.ndarray:
    """100 for what was classified correctly, else 0."""
    return 100.0 * (kept['labels'] == kept['predictions'])


assert Classification.scores[0] is ACCURACY  # which `outcomes` are of
