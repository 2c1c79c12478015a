"""The parts that all tasks on images share: reading, augmentation, normalization and splits."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
from jax.sharding import NamedSharding
from ml_collections import ConfigDict
from typing_extensions import override

from hbf.data.augment.batches import augment, normalize
from hbf.data.augment.copies import COPIES, Copies
from hbf.data.augment.entries import Entry
from hbf.data.augment.pairs import mix, read_mix
from hbf.data.augment.transforms import TRANSFORMS, check_size, read_transforms
from hbf.data.datasets import Dataset, load
from hbf.data.images import levels
from hbf.data.images.sources import Source, hold_out
from hbf.data.images.targets import CLASSES, TASK
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
from hbf.models.build import build_model
from hbf.tasks.answers import AnswerForm
from hbf.tasks.task import ModelBatch, Task


@dataclasses.dataclass(frozen=True)
class ImageReading:
  """Options for the transfer of images to the devices.

  Attributes:
    input: the kind of input, see `hbf.data.pipeline.inputs.make_input`.
    workers: number of processes that read the images of input 'stream'. 0: threads read them.
    resident_bytes: the most bytes of images that input 'auto' puts on each device.
  """

  input: str
  workers: int
  resident_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageTask(Task):
  """A task on images. A subclass adds the loss, the scores and the form of answers.

  `ModelBatch.targets` are two arrays. The first has the targets of the images, as the data set stores them: classes,
  int32 [B], or labels or values, float32 [B, K]. In training, the second has the targets of the loss, float32 [B, K]
  (`loss_targets`), mixed like the images. In evaluation, the second is a mask, bool [B], False for padding.

  K is the number of labels or values, or the number of classes.

  Attributes:
    targets: the kind of targets that the task needs, see `hbf.data.images.targets`.
    answers: the form of the answers.
    dataset: the images with their targets.
    reading: the options for the transfer of images to the devices.
    mean: the mean of each channel, on a scale from 0 (black) to 1 (white). () before it is measured.
    std: the standard deviation of each channel, on the same scale. () before it is measured.
    transforms: the transforms of each training image (`hbf.data.augment.transforms.read_transforms`).
    mix: the mixing of pairs of training images (`hbf.data.augment.pairs.read_mix`).
    seed: the seed of the order of the examples.
    validation: the fraction of train that is held out.
    stratify: True if the same fraction of every class is held out.
    copies: a function that makes changed copies of test images. The outputs for the copies are averaged. None: no
      copies.
  """

  example: ClassVar[str] = 'image'
  unit: ClassVar[str] = 'image'
  label_names: ClassVar[tuple[str, ...]] = ('labels',)
  targets: ClassVar[str]
  answers: ClassVar[AnswerForm]

  dataset: Dataset
  reading: ImageReading
  mean: Sequence[float]
  std: Sequence[float]
  transforms: Sequence[Entry]
  mix: Sequence[Entry]
  seed: int
  validation: float
  stratify: bool
  copies: Copies | None

  @classmethod
  @override
  def from_config(cls, config: ConfigDict, dataset: Dataset) -> Self:
    return cls(**cls.options(config, dataset))

  @classmethod
  def options(cls, config: ConfigDict, dataset: Dataset) -> dict[str, Any]:
    """Return the fields of the task for a run's config and a data set, by name; see `Task.from_config`."""
    data, transforms, pairs = config.data, read_transforms(config.data.transforms), read_mix(config.data.mix)
    cls._check_targets(dataset)
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
    channels = dataset.image_shape[-1]
    for key in ('mean', 'std'):
      if len(data[key]) not in (0, channels):
        raise UserError(
          f'data.{key} is {tuple(data[key])}: expected a number for each channel, and the images of {dataset.name} '
          f'have {channels}; give as many, or () to have them measured'
        )
    return {
      'dataset': dataset,
      'reading': ImageReading(data.input, data.workers, data.resident_bytes),
      'mean': tuple(data.mean),
      'std': tuple(data.std),
      'transforms': transforms,
      'mix': pairs,
      'seed': config.seed,
      'validation': data.validation,
      'stratify': data.stratify,
      'copies': choose('evaluate.copies', config.evaluate.copies, COPIES),
    }

  @classmethod
  def _check_targets(cls, dataset: Dataset) -> None:
    """Raise UserError if the data set has targets of another kind than the task needs."""
    if dataset.targets == cls.targets:
      return
    theirs = TASK[dataset.targets]
    one_hot = '; or turn one-hot labels into classes by y.argmax(-1)' if cls.targets == CLASSES else ''
    raise UserError(
      f'{dataset.name} has {dataset.targets}, and task {TASK[cls.targets]} needs {cls.targets}: make the config by '
      f"task={theirs}, as in hbf.get_config('{dataset.name}', task='{theirs}'){one_hot}"
    )

  @property
  def description(self) -> str:
    """The number and the kind of the outputs in words, such as '10 classes'."""
    return f'{len(self.dataset.classes)} {self.targets}'

  def make_model(self, model: ConfigDict) -> nn.Module:
    """Return the network of the `model` part of a config. It has an output for each class, label or value."""
    return build_model(model, len(self.dataset.classes))

  def about(self) -> dict[str, Any]:
    """Return additional facts for the config.json of an exported network. By default there are none."""
    return {}

  @staticmethod
  def outputs(logits: jax.Array, about: Mapping[str, Any]) -> jax.Array:
    """Return what a network, or its export, answers for these logits [B, K]: by default the logits themselves.

    Args:
      logits: the outputs of the network's head.
      about: facts that contain those of `about`.
    """
    del about
    return logits

  # Data.

  @classmethod
  @override
  def load_dataset(cls, config: ConfigDict) -> Dataset:
    keys = ('name', 'dir', 'root', 'image_size', 'download', 'test_split', 'validation_split', 'columns', 'cache')
    return load(**{key: config.data[key] for key in keys}, targets=cls.targets)

  @property
  def shape(self) -> tuple[int, ...]:
    """Height, width and channels of the images."""
    return self.dataset.image_shape

  @property
  def target_shape(self) -> tuple[int, ...]:
    """Shape of the target of an image: () for a class, (K,) for labels or values."""
    return () if self.targets == CLASSES else (len(self.dataset.classes),)

  @property
  def predictions(self) -> int:
    """The number of predictions for an image: 1 for a class, K for labels or values."""
    return math.prod(self.target_shape)

  @property
  def units(self) -> int:
    """The number of units (`TaskData.unit`) in an example: 1, because the unit is the image."""
    return 1

  @override
  def identity(self) -> dict[str, Any]:
    return identity(self.dataset)

  def splits(self, validation: float) -> dict[str, Source]:
    """Return the sources of train, validation and test, without empty splits.

    The held-out images are a random sample of train. If the data set has its own validation split, this split is
    taken instead, and `validation` is not used.
    """
    train, held_out = self._divided(validation, self.stratify)
    splits = {'train': train, 'validation': held_out, 'test': self.dataset.splits['test']}
    return {name: source for name, source in splits.items() if len(source)}

  def _divided(self, validation: float, stratify: bool) -> tuple[Source, Source]:
    """Return the images to train on and the held-out ones. See `splits` and `hold_out`."""
    own = self.dataset.splits.get('validation')
    train, held_out = hold_out(self.dataset.splits['train'], validation if own is None else 0.0, stratify)
    return train, held_out if own is None else own

  @override
  def open(self, source: Source, sharding: NamedSharding) -> ImageInput:
    reading = self.reading
    return make_input(reading.input, source, sharding, workers=reading.workers, resident_bytes=reading.resident_bytes)

  @override
  def abstract_inputs(self, source: Source, sharding: NamedSharding, *leading: int) -> tuple[Resident, Batch]:
    reading, target = self.reading, self.target_shape
    resident = abstract_resident(reading.input, len(source), self.shape, sharding, reading.resident_bytes, target)
    return resident, abstract_batch(resident, self.shape, sharding, *leading, target_shape=target)

  def measure(self, config: ConfigDict, train: Input | None) -> ConfigDict:
    """Return the config with `data.mean` and `data.std`.

    The config keeps its values if it has them. Otherwise both are measured. If `train` is None, each mean is 1/2 and
    each standard deviation is 1/4.
    """
    resolved = config.copy_and_resolve_references()
    if config.data.mean:
      return resolved
    if train is None:
      channels = self.shape[-1]
      resolved.data.update(mean=(0.5,) * channels, std=(0.25,) * channels)
    else:
      assert isinstance(train, ImageInput)
      resolved.data.mean, resolved.data.std = levels.statistics(*train.sums())
    return resolved

  # Batches.

  def train_batch(self, keys: tuple[jax.Array, jax.Array], resident: Resident, batch: Batch) -> ModelBatch:
    """Return augmented, mixed and normalized images. The first key is for augmentation, the second for mixing."""
    examples = gather(resident, batch)
    index, labels = examples['index'], examples['label']
    drawn = self.drawn_numbers(index)
    images = augment(
      keys[0], examples['image'], drawn, self.transforms, self.mean, *self._time(batch['step'], len(index))
    )
    images, targets = mix(keys[1], images, self.loss_targets(labels), drawn, self.mix)
    return ModelBatch(normalize(images, self.mean, self.std), (labels, targets))

  def drawn_numbers(self, index: jax.Array) -> jax.Array:
    """Return a number for each image of a batch, int32 [B], which decides its random numbers.

    By default it is the `index` of the image. An image must not come twice in a batch then, unless the batch has the
    end of an epoch.
    """
    return index

  def loss_targets(self, labels: jax.Array) -> jax.Array:
    """Return the targets of the loss, float32 [B, K], from the targets of the images. By default they are equal."""
    return labels

  def _time(self, step: jax.Array, batch_size: int) -> tuple[jax.Array, jax.Array] | tuple[()]:
    """Return the arguments `fixed_key` and `epochs` of `augment` in step `step`. () if no transform needs them."""
    if not needs_epochs(self.transforms):
      return ()
    # Only the number of held-out images matters here. `stratify` would read the labels and not change this number.
    train, _ = self._divided(self.validation, stratify=False)
    order = TrainOrder(self.seed, len(train), batch_size)
    # This key differs from the keys of steps: they fold in the number of the step, which never reaches 2**32 − 1.
    return jax.random.fold_in(jax.random.key(self.seed), 2**32 - 1), order.epochs(step)

  def eval_batch(self, resident: Resident, batch: Batch) -> ModelBatch:
    """Return normalized images without augmentation."""
    examples = gather(resident, batch)
    return ModelBatch(normalize(examples['image'], self.mean, self.std), (examples['label'], examples['mask']))

  def mean_of(self, values: jax.Array, targets: Any) -> jax.Array:
    """Return the mean of `values`, [B] or [B, K]. It is over all predictions, so `targets` is not used."""
    del targets
    return values.mean()


def needs_epochs(transforms: Sequence[Entry]) -> bool:
  """Return True if a transform needs the index of the epoch."""
  return 'epoch' in {need for name, *_ in transforms for need in TRANSFORMS[name].needs}
