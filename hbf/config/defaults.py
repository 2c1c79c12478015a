"""Every key of a config: its default, its allowed values and its meaning.

The options of the stages are the fields of their classes in hbf/nn.
"""

import dataclasses
import numbers
from typing import Any

from ml_collections import ConfigDict, config_dict

from hbf.data.augment.copies import COPIES
from hbf.models.build import DTYPES
from hbf.models.embedding import PatchEmbedding
from hbf.models.language import LanguageModel
from hbf.nn.registry import stage_options, stage_values
from hbf.nn.trunk import Trunk
from hbf.options import (
  DURATION,
  ENTRIES,
  FLAG,
  LEVELS,
  NOT_NEGATIVE,
  PERIOD,
  POSITIVE,
  RATE,
  SHARE,
  SPREADS,
  TEXT,
  Values,
  one_of,
  values_of,
  whole,
)


@dataclasses.dataclass(frozen=True)
class Key:
  """A key of a config.

  Attributes:
    default: its value in a fresh config. None: it starts empty, and a recipe or `hbf.config.resolve` fills it.
    values: the allowed values.
    meaning: one line for the reader.
  """

  default: Any
  values: Values
  meaning: str


_AXIS = whole(1, also=-1)
_EMBEDDING, _TRUNK, _LANGUAGE = map(values_of, (PatchEmbedding, Trunk, LanguageModel))

COMMON = {
  'task': Key('classification', one_of(('classification', 'next_token', 'masked_token')), 'of images, or of texts'),
  'recipe': Key('', TEXT, 'name of the recipe'),
  'seed': Key(0, whole(0, 2**32 - 1), 'of parameters, order, augmentation and dropout'),  # JAX takes 32 bits of it
  'init_from': Key('', TEXT, "weights of Google's, timm's or the authors' code to start from; '': fresh ones"),
  # Devices along each axis of their mesh, docs/devices.md.
  'mesh.data': Key(-1, _AXIS, 'devices that have the parameters each; -1: as many as are left'),
  'mesh.fsdp': Key(1, _AXIS, 'devices that share the parameters, as they share the batch'),
  'mesh.tensor': Key(1, _AXIS, 'devices that share heads, hidden units and centers'),
  'model.name': Key('', TEXT, 'in hbf/nn/registry.py, or any pair as STAGE1+STAGE2, such as softmax+hyperbf'),
  'model.width': Key(None, _EMBEDDING['width'], 'dimensions of a token'),
  'model.depth': Key(None, _TRUNK['depth'], 'blocks'),
  'model.heads': Key(None, whole(1), 'of stage 1, if it has heads'),
  'model.expansion': Key(None, POSITIVE, 'units of a block over the width, for stages that leave them empty'),
  'model.dropout': Key(0.0, _TRUNK['dropout'], 'rate after the embedding and after each stage'),
  'model.dtype': Key('float32', one_of(DTYPES), 'of the products'),
  'model.norm_epsilon': Key(1e-6, _TRUNK['norm_epsilon'], 'added to the variance in each LayerNorm'),
  'model.scan_layers': Key(False, FLAG, "loop over one block: the program doesn't grow with depth; slower on a CPU"),
  'model.parallel': Key(False, FLAG, "both stages read the block's input"),
  'model.layer_scale': Key(
    0.0, _TRUNK['layer_scale'], "start of a factor on each channel of a stage's output; 0: none"
  ),
  'model.drop_path': Key(0.0, _TRUNK['drop_path'], 'stochastic depth: rate in the last block, linear from 0'),
  'model.remat': Key(False, FLAG, 'compute blocks again in the backward pass; on a CPU it helps only if scanned'),
  'data.name': Key('', TEXT, 'of the data set'),
  'data.dir': Key('~/tensorflow_datasets', TEXT, 'where TFDS data lie, prepared; a bucket works too'),
  'data.root': Key('', TEXT, 'image_folder: the folder with train/CLASS/*, test/CLASS/*; text_file: file or folder'),
  'data.test_split': Key('test', TEXT, "the labeled split to test on; TFDS's ImageNet: validation"),
  'data.download': Key(False, FLAG, 'may fetch the official archive'),
  'data.validation': Key(0.02, RATE, 'part of train held out to select checkpoints; 0: none'),
  'train.epochs': Key(None, POSITIVE, 'length of the run'),
  'train.batch_size': Key(None, whole(1), 'examples a step'),
  # A signal waits until the steps of a call are taken. A stream needs as many batches of images at once.
  'train.steps_per_call': Key(0, whole(0), 'most steps asked for at once; 0: 10, but 1 from a stream and on a CPU'),
  'train.accumulate': Key(1, whole(1), 'parts of a batch computed one after another, to save memory'),
  'train.label_smoothing': Key(0.0, SHARE, 'of the probability, shared by all classes'),
  'train.average': Key(0.0, RATE, 'decay of a moving average of the parameters, evaluated beside them; 0: none'),
  'optimizer.name': Key(
    'adamw', one_of(('adamw', 'muon', 'sgd', 'lion')), 'muon: for matrices of the blocks, adamw for the rest'
  ),
  'optimizer.learning_rate': Key(1e-3, NOT_NEGATIVE, 'at the peak; 0: the parameters stay'),
  'optimizer.schedule': Key(
    'cosine', one_of(('cosine', 'linear', 'wsd', 'constant')), 'wsd: constant, then linear over `decay`'
  ),
  'optimizer.minimum_rate': Key(0.0, SHARE, 'learning rate at the end of all but constant, over that at the peak'),
  'optimizer.decay': Key('20%', DURATION, "of wsd, at the run's end; the other schedules ignore it"),
  'optimizer.warmup': Key('5%', DURATION, 'linear, from 0 to the peak'),
  'optimizer.weight_decay': Key(0.05, NOT_NEGATIVE, 'of kernels, centers and coefficients'),
  'optimizer.momentum': Key(0.9, RATE, 'first moment'),
  'optimizer.second_momentum': Key(0.999, RATE, 'second moment of adamw'),
  'optimizer.matrix_momentum': Key(0.95, RATE, "of muon's matrices"),
  'optimizer.clip': Key(1.0, NOT_NEGATIVE, 'global norm of the gradient; 0: off'),
  'optimizer.sigma_rate': Key(1.0, NOT_NEGATIVE, 'learning rate of σ or 1/2σ² over that of the rest'),
  'optimizer.center_rate': Key(None, NOT_NEGATIVE, 'likewise of learned centers; empty: √model.width'),
  'optimizer.layer_decay': Key(1.0, SHARE, 'factor on the learning rate for each block below the head'),
  'evaluate.every': Key('1epoch', PERIOD, 'on the held-out part of train'),
  'checkpoint.every': Key('1epoch', PERIOD, 'between checkpoints'),
  'checkpoint.keep': Key(2, whole(1), 'latest ones; the best on what is held out is kept too'),
  'log.every': Key('50steps', PERIOD, 'between lines of metrics.jsonl'),
  'log.tensorboard': Key(False, FLAG, 'write events for TensorBoard too'),
}
IMAGES = {
  'model.patch': Key(4, _EMBEDDING['patch'], 'pixels along the side of a token'),
  'model.stem': Key('patch', _EMBEDDING['stem'], 'patch: a linear map of its pixels; conv: convolutions of 3×3'),
  'model.whiten': Key(False, FLAG, 'fix the first convolution of stem conv to what whitens the first batch'),
  'model.merge': Key(0, _TRUNK['merge'], 'block before which 2×2 tokens become one of twice the width; 0: none'),
  'model.pool': Key('cls', _EMBEDDING['pool'], 'cls, mean, sequence: mean weighted by a learned score'),
  'model.positions': Key('learned', _EMBEDDING['positions'], 'what is added to the tokens'),
  'data.image_size': Key(0, whole(0), 'images are resized to this square; 0: as stored'),
  'data.input': Key(
    'auto', one_of(('auto', 'device', 'stream')), 'whole set in device memory, or Grain; auto: by size'
  ),
  'data.resident_bytes': Key(2_000_000_000, whole(0), 'auto: larger sets are streamed'),
  'data.workers': Key(2, whole(0), 'processes that decode images for the stream; 0: threads'),
  'data.stratify': Key(False, FLAG, 'hold out the same part of every class; TFDS data are read once more for it'),
  'data.transforms': Key((('flip',), ('shift', 4)), ENTRIES, 'of training images, in order; docs/options.md has all'),
  'data.mix': Key((), ENTRIES, "of pairs: (('mixup', alpha, share of the images), ('cutmix', alpha, share))"),
  'data.mean': Key((), LEVELS, 'of the channels; empty: measured on train'),
  'data.std': Key((), SPREADS, 'likewise, their standard deviation'),
  'evaluate.batch_size': Key(500, whole(1), 'images at once'),
  'evaluate.copies': Key('none', one_of(COPIES), 'figures of outputs averaged over copies of images, beside'),
}
TEXTS = {
  'model.positions': Key('learned', _LANGUAGE['positions'], 'what is added to the tokens'),
  'model.tied': Key(True, _LANGUAGE['tied'], "the head's weights are the vectors of the tokens"),
  'data.tokenizer': Key('bytes', one_of(('bytes', 'characters', 'bpe')), 'makes tokens of a text'),
  'data.vocabulary': Key(4096, whole(257), 'tokens that bpe learns'),
  'data.length': Key(256, whole(2), 'tokens of a window: what the model sees at once'),
  'evaluate.batch_size': Key(100, whole(1), 'texts at once'),
}
_SECTIONS = ('mesh', 'model', 'data', 'train', 'optimizer', 'evaluate', 'checkpoint', 'log')


def keys(task: str) -> dict[str, Key]:
  """Return the keys of a config for a task, by dotted name, without those of the stages."""
  return COMMON | (IMAGES if task == 'classification' else TEXTS)


def stage_keys(model: str) -> dict[str, Key]:
  """Return the keys of a model's two stages, by dotted name.

  Raises:
    UserError: there is no such model.
  """
  stages = zip(('stage1', 'stage2'), stage_options(model, None), stage_values(model), strict=True)
  return {
    f'model.{stage}.{option}': Key(default[option], each, 'see the fields of the stage')
    for stage, default, values in stages
    for option, each in values.items()
  }


def defaults(task: str) -> ConfigDict:
  """Return a config for a task with every default, without the options of stages."""
  config = ConfigDict({name: {} for name in _SECTIONS})
  for name, key in keys(task).items():
    section, _, last = name.rpartition('.')
    within = config[section] if section else config
    within[last] = empty(key.values) if key.default is None else key.default
  config.task = task
  return config


def empty(values: Values) -> Any:
  """Return a placeholder for one of these values."""
  return config_dict.placeholder(int if values.kind is numbers.Integral else float)
