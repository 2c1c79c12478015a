"""The classification of images."""

import dataclasses
import functools
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
from hbf.data.images.sources import labels as labels_of
from hbf.data.pipeline.host import Order
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
from hbf.data.pipeline.order import BalancedOrder, TrainOrder
from hbf.errors import UserError, choose
from hbf.evaluation.classification import Counts, detail, summarize
from hbf.evaluation.scores import ACCURACY, CLASSIFICATION, Score
from hbf.models.build import build_model
from hbf.tasks.task import ModelBatch, Task


@dataclasses.dataclass(frozen=True)
class ImageReading:
  """Options for the transfer of images to the devices, as in `hbf.data.pipeline.inputs.make_input`."""

  input: str
  workers: int
  resident_bytes: int


@dataclasses.dataclass(frozen=True)
class Classification(Task):
  """The classification of images.

  The targets of a batch are two arrays. The first has the labels, int32 [B]. In training, the second has class
  probabilities [B, classes]. In evaluation, the second is a mask of booleans [B] that is False for padding.

  Attributes:
    dataset: the images.
    reading: how the images get to the devices.
    mean: the mean of each channel, with white as 1. () before it is measured.
    std: the standard deviation of each channel, with white as 1. () before it is measured.
    transforms: the transforms of each training image (`hbf.data.augment.transforms.read_transforms`).
    mix: the mixing of pairs of training images (`hbf.data.augment.pairs.read_mix`).
    label_smoothing: the part of the target probability that training spreads evenly over all classes.
    seed: the seed of the order of the examples.
    validation: the fraction of train that is held out.
    stratify: True if the same fraction of every class is held out.
    balance: the treatment of rare classes. 'weights': their images weigh more in the loss. 'sampling': their images
      come more often, so that all classes are equally frequent. '': all images are alike.
    copies: a function that makes copies of test images. The outputs for the copies are averaged. None: no copies.
  """

  example: ClassVar[str] = 'image'
  unit: ClassVar[str] = 'image'
  scores: ClassVar[tuple[Score, ...]] = CLASSIFICATION
  label_names: ClassVar[tuple[str, ...]] = ('labels',)
  demo_command: ClassVar[str] = 'python -m hbf explain'

  dataset: Dataset
  reading: ImageReading
  mean: Sequence[float]
  std: Sequence[float]
  transforms: Sequence[Entry]
  mix: Sequence[Entry]
  label_smoothing: float
  seed: int
  validation: float
  stratify: bool
  balance: str
  copies: Copies | None

  @classmethod
  def from_config(cls, config: ConfigDict, dataset: Dataset) -> Self:
    """Return the task of a run's config on a data set; see `Task.from_config`."""
    data, transforms, pairs = config.data, read_transforms(config.data.transforms), read_mix(config.data.mix)
    check_size(transforms, dataset.image_shape)
    if pairs and config.train.batch_size == 1:
      raise UserError(
        'data.mix needs another image to mix one with: set train.batch_size to 2 or more, or data.mix to ()'
      )
    if bool(data.mean) != bool(data.std):
      raise UserError('give both data.mean and data.std, or neither to have them measured')
    if data.validation_split and dataset.splits and 'validation' not in dataset.splits:
      raise UserError(
        f'data.validation_split is {data.validation_split}, and {dataset.name} has train and test only: leave it '
        'empty, and hold out a part of train by data.validation'
      )
    if data.balance == 'sampling' and _needs_epochs(transforms):
      raise UserError(
        'data.balance=sampling has no epochs, which the transform alternate_flip needs: use flip, or '
        'data.balance=weights'
      )
    channels = dataset.image_shape[-1]
    for key in ('mean', 'std'):
      if len(data[key]) not in (0, channels):
        raise UserError(
          f'data.{key} is {tuple(data[key])}: expected a number for each channel, and the images of {dataset.name} '
          f'have {channels}; give as many, or () to have them measured'
        )
    return cls(
      dataset=dataset,
      reading=ImageReading(data.input, data.workers, data.resident_bytes),
      mean=tuple(data.mean),
      std=tuple(data.std),
      transforms=transforms,
      mix=pairs,
      label_smoothing=config.train.label_smoothing,
      seed=config.seed,
      validation=data.validation,
      stratify=data.stratify,
      balance=data.balance,
      copies=choose('evaluate.copies', config.evaluate.copies, COPIES),
    )

  @property
  def description(self) -> str:
    """The number of classes, in words."""
    return f'{len(self.dataset.classes)} classes'

  def make_model(self, model: ConfigDict) -> nn.Module:
    """Return the classifier that the `model` part of a config describes."""
    return build_model(model, len(self.dataset.classes))

  # Data.

  @classmethod
  def load_dataset(cls, config: ConfigDict) -> Dataset:
    """Load the data set that a config names; see `hbf.data.datasets.load`."""
    keys = ('name', 'dir', 'root', 'image_size', 'download', 'test_split', 'validation_split', 'columns', 'cache')
    return load(**{key: config.data[key] for key in keys})

  @property
  def shape(self) -> tuple[int, ...]:
    """Height, width and channels of the images."""
    return self.dataset.image_shape

  @property
  def units(self) -> int:
    """The number of units in an example: 1, because the unit is the image."""
    return 1

  def identity(self) -> dict[str, Any]:
    """Return the identity of the images; see `hbf.data.pipeline.identity.identity`."""
    return identity(self.dataset)

  def splits(self, validation: float) -> dict[str, Source]:
    """Return the sources of train, validation and test, without empty splits.

    The held-out images are a random sample of train. If the data set has its own validation split, this split is
    taken instead, and `validation` is not used.
    """
    own = self.dataset.splits.get('validation')
    train, held_out = hold_out(self.dataset.splits['train'], validation if own is None else 0.0, self.stratify)
    splits = {'train': train, 'validation': held_out if own is None else own, 'test': self.dataset.splits['test']}
    return {name: source for name, source in splits.items() if len(source)}

  def train_order(self, source: Source, seed: int, batch_size: int) -> Order:
    """Return the order of the training images; see `TaskData.train_order`."""
    if self.balance == 'sampling':
      return BalancedOrder.from_labels(seed, labels_of(source), batch_size)
    return super().train_order(source, seed, batch_size)

  @functools.cached_property
  def class_weights(self) -> np.ndarray:
    """The weight of each class, N/(C·n), float32 [classes], where n of the N training images are of the class.

    C is the number of classes with images. So the mean weight of an image is 1. A class without images has weight 0.
    """
    counts = np.bincount(labels_of(self.splits(self.validation)['train']), minlength=len(self.dataset.classes))
    weights = counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1))
    return np.where(counts > 0, weights, 0).astype(np.float32)

  def open(self, source: Source, sharding: NamedSharding) -> ImageInput:
    """Open a source of images; see `hbf.data.pipeline.inputs.make_input`."""
    reading = self.reading
    return make_input(reading.input, source, sharding, workers=reading.workers, resident_bytes=reading.resident_bytes)

  def abstract_inputs(self, source: Source, sharding: NamedSharding, *leading: int) -> tuple[Resident, Batch]:
    """Return the shapes and shardings of a step's input arrays; see `TaskData.abstract_inputs`."""
    reading = self.reading
    resident = abstract_resident(reading.input, len(source), self.shape, sharding, reading.resident_bytes)
    return resident, abstract_batch(resident, self.shape, sharding, *leading)

  def measure(self, config: ConfigDict, train: Input | None) -> ConfigDict:
    """Return the config with `data.mean` and `data.std`. If `train` is None, each mean is 1/2 and each std 1/4."""
    resolved = config.copy_and_resolve_references()
    if train is None:
      channels = self.shape[-1]
      resolved.data.update(mean=(0.5,) * channels, std=(0.25,) * channels)
    elif not config.data.mean:
      assert isinstance(train, ImageInput)
      resolved.data.mean, resolved.data.std = levels.statistics(*train.sums())
    return resolved

  # Loss.

  @property
  def predictions(self) -> int:
    """The number of predictions for an example: 1, its class."""
    return 1

  def train_batch(self, keys: tuple[jax.Array, jax.Array], resident: Resident, batch: Batch) -> ModelBatch:
    """Return augmented and mixed images. The first key is for augmentation, the second for mixing."""
    examples = gather(resident, batch)
    index, labels = examples['index'], examples['label']
    images = augment(
      keys[0], examples['image'], index, self.transforms, self.mean, *self._time(batch['step'], len(index))
    )
    targets = jax.nn.one_hot(labels, len(self.dataset.classes))
    images, targets = mix(keys[1], images, targets, index, self.mix)
    return ModelBatch(normalize(images, self.mean, self.std), (labels, targets))

  def _time(self, step: jax.Array, batch_size: int) -> tuple[jax.Array, jax.Array] | tuple[()]:
    """Return the run's random key, and the epoch of each image of a batch. () if no transform needs them."""
    if not _needs_epochs(self.transforms):
      return ()
    # Only the number of held-out images matters here. `stratify` would read the labels and not change this number.
    train, _ = hold_out(self.dataset.splits['train'], self.validation, stratify=False)
    order = TrainOrder(self.seed, len(train), batch_size)
    # This key differs from the keys of steps: they fold in the number of the step, which never reaches 2**32 − 1.
    return jax.random.fold_in(jax.random.key(self.seed), 2**32 - 1), order.epochs(step)

  def eval_batch(self, resident: Resident, batch: Batch) -> ModelBatch:
    """Return the images without augmentation."""
    examples = gather(resident, batch)
    return ModelBatch(normalize(examples['image'], self.mean, self.std), (examples['label'], examples['mask']))

  def mean_of(self, values: jax.Array, targets: Any) -> jax.Array:
    """Return the mean over the images of a batch."""
    del targets
    return values.mean()

  def loss(self, logits: jax.Array, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Return the mean cross-entropy of a batch, and the number of images whose likeliest class is right.

    With balance 'weights', each cross-entropy is multiplied by the weight of the image's class. A mixed image has the
    mean weight of its classes.
    """
    labels, probabilities = targets
    correct = jnp.sum(jnp.argmax(logits, axis=-1) == labels, dtype=jnp.int32)
    smooth = optax.smooth_labels(probabilities, self.label_smoothing)
    losses = optax.softmax_cross_entropy(logits, smooth)
    if self.balance == 'weights':
      losses = losses * (probabilities @ self.class_weights)
    return self.mean_of(losses, targets), correct

  # Scores.

  def empty_counts(self) -> Counts:
    """Return the counts before the first image: zeros."""
    return Counts.zeros(len(self.dataset.classes))

  def add_counts(self, counts: Counts, logits: jax.Array, targets: Any) -> tuple[Counts, dict[str, jax.Array]]:
    """Add an evaluated batch to the counts. Also return `labels` and `predictions` of each image, int32."""
    labels, mask = targets
    per_example = {'labels': labels, 'predictions': jnp.argmax(logits, axis=-1).astype(jnp.int32)}
    return counts.add(logits, labels, mask), per_example

  def summarize(self, counts: Counts) -> dict[str, Any]:
    """Return the scores of a split; see `hbf.evaluation.classification.summarize`."""
    return summarize(counts)

  def details(self, counts: Counts) -> dict[str, Any]:
    """Return the accuracy of each class, and other tables; see `hbf.evaluation.classification.detail`."""
    return detail(counts)

  @staticmethod
  def example_scores(per_example: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return 100 for each image that is classified correctly, else 0."""
    return 100.0 * (per_example['labels'] == per_example['predictions'])


def _needs_epochs(transforms: Sequence[Entry]) -> bool:
  """Return True if a transform needs the number of the epoch."""
  return 'epoch' in {need for name, *_ in transforms for need in TRANSFORMS[name].needs}


assert Classification.scores[0] is ACCURACY  # `example_scores` has the mean `accuracy`
