"""Every key of a config: its default, its allowed values and its meaning.

The options of the two stages are config keys too. They are declared as fields of the stage classes in hbf/nn.
`hbf.config.reference` writes all keys and options as a page.
"""

import dataclasses
import numbers
from typing import Any

from ml_collections import ConfigDict, config_dict

from hbf.data.augment.copies import COPIES
from hbf.data.images.targets import TASK
from hbf.models.build import DTYPES
from hbf.models.embedding import PatchEmbedding
from hbf.models.language import LanguageModel
from hbf.nn.registry import stage_options, stage_values
from hbf.nn.trunk import Trunk
from hbf.options import (
  AT_LEAST_ONE,
  DURATION,
  ENTRIES,
  FLAG,
  LEVELS,
  NOT_NEGATIVE,
  NUMBERS,
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
    default: the value that `defaults` sets. None: the key starts empty, and a recipe or `hbf.config.resolve` fills
      it.
    values: the allowed values.
    meaning: a short description for users.
  """

  default: Any
  values: Values
  meaning: str


_AXIS = whole(1, also=-1)
IMAGE_TASKS = tuple(TASK.values())
TEXT_TASKS = ('next_token', 'masked_token')
_EMBEDDING, _TRUNK, _LANGUAGE = map(values_of, (PatchEmbedding, Trunk, LanguageModel))
LARGEST_SEED = 2**32 - 1  # JAX uses only 32 bits of a seed

COMMON = {
  'task': Key(
    'classification',
    one_of((*IMAGE_TASKS, *TEXT_TASKS)),
    'Task: to classify images, to predict labels (multi_label) or values (regression) of images, to predict the next '
    'token of a text, or to predict masked tokens. The argument task=NAME of --config sets it.',
  ),
  'recipe': Key('', TEXT, 'Name of the recipe. The argument recipe=NAME of --config sets it.'),
  'seed': Key(
    0, whole(0, LARGEST_SEED), 'Seed of the initial parameters, the order of examples, augmentation and dropout.'
  ),
  'init_from': Key(
    '',
    TEXT,
    'Weights that the run starts from: a run folder, RUN/checkpoints/STEP, an exported model, the name of a '
    "pretrained model, or a file of Google's, timm's or the memo authors' code. Empty: the run starts from random "
    'parameters.',
  ),
  'mesh.data': Key(
    -1, _AXIS, 'Number of devices along the axis that splits each batch. -1: all devices that are left.'
  ),
  'mesh.fsdp': Key(1, _AXIS, 'Number of devices along the axis that splits each batch and the parameters.'),
  'mesh.tensor': Key(1, _AXIS, 'Number of devices along the axis that splits heads, hidden units and centers.'),
  'model.name': Key('', TEXT, 'Name of the model, or any pair of stages as STAGE1+STAGE2, such as softmax+hyperbf.'),
  'model.width': Key(None, _EMBEDDING['width'], 'Number of dimensions of a token. The recipe sets it.'),
  'model.depth': Key(None, _TRUNK['depth'], 'Number of blocks. The recipe sets it.'),
  'model.heads': Key(None, whole(1), 'Number of heads of stage 1, if it has heads. The recipe sets it.'),
  'model.expansion': Key(
    None,
    POSITIVE,
    'Default number of units of a block, divided by the width. The recipe sets it. If a number of units, such as '
    'model.stage2.centers, is empty, it is computed from this key. The stored config.json has the computed numbers '
    'instead of this key.',
  ),
  'model.dropout': Key(0.0, _TRUNK['dropout'], 'Dropout rate after the embedding and after each stage.'),
  'model.dtype': Key('float32', one_of(DTYPES), 'Type of the matrix products. Parameters are float32.'),
  'model.norm_epsilon': Key(1e-6, _TRUNK['norm_epsilon'], 'Number added to the variance in each LayerNorm.'),
  'model.scan_layers': Key(
    False,
    FLAG,
    'True to compute all blocks by one loop. Then the compiled program does not grow with the depth. This is slower '
    'on a CPU.',
  ),
  'model.parallel': Key(False, FLAG, "True if both stages work on the block's input."),
  'model.layer_scale': Key(
    0.0,
    _TRUNK['layer_scale'],
    "Initial value of a learned factor on each channel of a stage's output (LayerScale). 0: there are no factors.",
  ),
  'model.drop_path': Key(
    0.0, _TRUNK['drop_path'], 'Rate of stochastic depth in the last block. The rate grows linearly from 0.'
  ),
  'model.remat': Key(
    False,
    FLAG,
    'True to save memory: the backward pass computes the activations of a block again. On a CPU this only helps '
    'together with scan_layers.',
  ),
  'data.name': Key('', TEXT, 'Name of the data set. The first part of --config sets it.'),
  'data.dir': Key(
    '~/tensorflow_datasets', TEXT, 'Folder of the prepared TFDS data sets. It may be a bucket, such as gs://NAME.'
  ),
  'data.root': Key(
    '',
    TEXT,
    'Path of your own data. For image_folder: a folder with train/CLASS/* and test/CLASS/*. For parquet and '
    'webdataset: a folder with train-* and test-*. For array_files: a file. For text_file: a file or folder.',
  ),
  'data.test_split': Key('test', TEXT, "Name of the labeled split to test on. TFDS's ImageNet calls it validation."),
  'data.input': Key(
    'auto',
    one_of(('auto', 'device', 'stream')),
    'Source of batches. device: all images, or the whole text, lie in device memory. stream: the host reads each '
    'batch. auto: device if the data fit into `data.resident_bytes`, else stream.',
  ),
  'data.resident_bytes': Key(
    2_000_000_000,
    whole(0),
    'With `data.input=auto`: all images, or the whole text, lie in device memory if they take at most this number of '
    'bytes on each device.',
  ),
  'data.cache': Key(
    '',
    TEXT,
    'Folder for decoded and resized images, or for the tokens of texts, which the first run writes and later runs '
    'read. Empty: there is none.',
  ),
  'data.download': Key(False, FLAG, 'True to download the official archive if the data set is not prepared yet.'),
  'data.validation': Key(
    0.02, RATE, 'Fraction of the training data held out to select checkpoints. 0 holds out none.'
  ),
  'train.epochs': Key(None, POSITIVE, 'Length of the run in passes over the training data. The recipe sets it.'),
  'train.batch_size': Key(None, whole(1), 'Number of examples in a step, over all devices. The recipe sets it.'),
  # With more steps in a call, a run reacts to a signal later, and a stream holds more batches in memory at once.
  'train.steps_per_call': Key(
    0,
    whole(0),
    'Largest number of steps in one call of the compiled program. 0: 1 step on a CPU or with streamed data, else 10.',
  ),
  'train.accumulate': Key(
    0,
    whole(0),
    'Number of parts of a batch that are computed one after another, to save memory. 0: 1 part, or more parts of '
    'images on a CPU, where this is faster.',
  ),
  'train.label_smoothing': Key(
    0.0,
    SHARE,
    'Share of the target probability that is spread evenly: over all classes, over the vocabulary, or over the two '
    'values of a label.',
  ),
  'train.average': Key(
    0.0,
    RATE,
    'Decay of a moving average of the parameters, which is evaluated beside the parameters. 0: there is no average.',
  ),
  'train.patience': Key(
    0,
    whole(0),
    'The run ends early after this number of consecutive evaluations on held-out data without a better score. 0: it '
    'never ends early.',
  ),
  'train.teacher': Key(
    '',
    TEXT,
    'Trained network of this package that the run also learns from (distillation): a run folder, '
    'RUN/checkpoints/STEP, an exported model or the name of a pretrained model. Empty: there is none.',
  ),
  'train.teacher_weight': Key(
    0.0,
    SHARE,
    "Weight w of the teacher's answers in the loss. The true answers have the weight 1 - w. 0: there is no teacher.",
  ),
  'train.temperature': Key(
    2.0, POSITIVE, 'Number that divides the logits of teacher and student before they are compared.'
  ),
  'optimizer.name': Key(
    'adamw',
    one_of(('adamw', 'muon', 'sgd', 'lion', 'lamb', 'adafactor', 'schedule_free')),
    'Optimizer. muon updates the matrices of the blocks, and adamw everything else. schedule_free is adamw with an '
    'average of its own, which is evaluated beside the parameters. It needs a constant schedule.',
  ),
  'optimizer.learning_rate': Key(
    1e-3, NOT_NEGATIVE, 'Learning rate at the peak. With 0 the parameters do not change.'
  ),
  'optimizer.schedule': Key(
    'cosine',
    one_of(('cosine', 'restarts', 'linear', 'wsd', 'rsqrt', 'plateau', 'constant')),
    'Course of the learning rate after the warm-up. With `restarts` there are `optimizer.cycles` cosine '
    'decays, one after another. With `wsd` the rate stays at the peak until the last part of the run, and then '
    'decays linearly. `optimizer.decay` is the length of this part. With `rsqrt` the rate is proportional to '
    '1/√step. With `plateau` it falls when the held-out score no longer improves.',
  ),
  'optimizer.minimum_rate': Key(
    0.0, SHARE, 'Least learning rate, divided by the peak. The schedules `constant` and `rsqrt` need 0.'
  ),
  'optimizer.decay': Key(
    '20%', DURATION, 'Length of the decay at the end of schedule `wsd`. The other schedules ignore this key.'
  ),
  'optimizer.cycles': Key(
    4, whole(1), 'For schedule `restarts`: number of cosine decays, which together fill the run after the warm-up.'
  ),
  'optimizer.cycle_growth': Key(
    1.0, AT_LEAST_ONE, 'For schedule `restarts`: length of a cosine decay, divided by the length of the one before.'
  ),
  'optimizer.plateau_patience': Key(
    5,
    whole(1),
    'For schedule `plateau`: number of evaluations without a better held-out score, after which the rate falls.',
  ),
  'optimizer.plateau_factor': Key(
    0.1,
    Values(numbers.Real, 'a number above 0 and below 1', lambda z: 0 < z < 1),
    'For schedule `plateau`: factor by which the rate is multiplied each time it falls.',
  ),
  'optimizer.warmup': Key('5%', DURATION, 'Length of the linear warm-up from 0 to the peak.'),
  'optimizer.weight_decay': Key(
    0.05, NOT_NEGATIVE, 'Decoupled weight decay of weights, centers and coefficients. Other parameters do not decay.'
  ),
  'optimizer.momentum': Key(0.9, RATE, 'Decay of the average of the gradients (the first moment).'),
  'optimizer.second_momentum': Key(
    0.999, RATE, 'Decay of the average of the squared gradients (the second moment of adamw).'
  ),
  'optimizer.matrix_momentum': Key(0.95, RATE, 'Momentum of the matrices that muon updates.'),
  'optimizer.clip': Key(1.0, NOT_NEGATIVE, 'Largest global norm of the gradient. 0: gradients are not clipped.'),
  'optimizer.sam': Key(
    0.0,
    NOT_NEGATIVE,
    'Radius of sharpness-aware minimization (SAM), such as 0.05. A step then takes two gradients. 0: it takes one.',
  ),
  'optimizer.skip': Key(
    0,
    whole(0),
    'Number of consecutive steps that may be skipped. A step is skipped if it would make a number of the training '
    'state NaN or infinite. If the next step would have to be skipped too, the run ends with an error. 0: no step is '
    'skipped.',
  ),
  'optimizer.sigma_rate': Key(
    1.0, NOT_NEGATIVE, 'Factor on the learning rate of log σ, and of β of kernel signed_gaussian.'
  ),
  'optimizer.center_rate': Key(
    None,
    NOT_NEGATIVE,
    'Factor on the learning rate of learned centers. If it is empty, it becomes √model.width, '
    'and 1 for lamb and adafactor.',
  ),
  'optimizer.layer_decay': Key(
    1.0,
    SHARE,
    'Factor d of layer-wise decay. With L blocks, the learning rate in block i = 0 … L - 1 is multiplied by '
    'd^(L - i). 1: the rate is the same in all blocks.',
  ),
  'evaluate.every': Key('1epoch', PERIOD, 'Time between evaluations on the held-out part of the training data.'),
  'checkpoint.every': Key('1epoch', PERIOD, 'Time between checkpoints.'),
  'checkpoint.keep': Key(
    2, whole(1), 'Number of latest checkpoints to keep. The best one on held-out data is kept too.'
  ),
  'checkpoint.rank': Key(
    'parameters',
    one_of(('parameters', 'average')),
    'Scores on held-out data that rank the checkpoints: those of the parameters, or those of their average.',
  ),
  'log.every': Key('50steps', PERIOD, 'Time between train lines of metrics.jsonl.'),
  'log.units': Key(
    True,
    FLAG,
    'True to log the percentages of dead, constant and doubled centers of stage 2, at the start and at evaluations.',
  ),
  'log.noise_scale': Key(
    False,
    FLAG,
    'True to log the gradient noise scale. A step must compute a batch in parts (`train.accumulate` of 2 or more).',
  ),
  'log.to': Key(
    '',
    TEXT,
    'Programs that get the numbers of metrics.jsonl too, separated by commas: tensorboard, wandb and mlflow. The '
    'first two also get training images, and histograms of all parameters.',
  ),
  'log.profile': Key(
    '', TEXT, "Steps FIRST..LAST of which a trace is written, for TensorBoard and Perfetto. '': no steps."
  ),
}
IMAGES = {
  'model.patch': Key(4, _EMBEDDING['patch'], 'Side of the square of pixels that becomes a token.'),
  'model.stem': Key(
    'patch',
    _EMBEDDING['stem'],
    'Embedding of a patch. patch: a linear map of its pixels. conv: 3×3 convolutions with a stride of 2.',
  ),
  'model.whiten': Key(
    False,
    FLAG,
    'True to fix the first convolution of stem conv. It whitens patches of the first batch and is never trained.',
  ),
  'model.merge': Key(
    (),
    _TRUNK['merge'],
    'Blocks before which every 2×2 tokens become one token of twice the width. (): there is one resolution.',
  ),
  'model.window': Key(
    0,
    _TRUNK['window'],
    'Side of the squares of patches in which stage 1 mixes tokens. In every second block of a resolution the squares '
    'are moved by half a side. 0: stage 1 mixes all tokens.',
  ),
  'model.pool': Key(
    'cls',
    _EMBEDDING['pool'],
    'Input of the head. cls: a class token. mean: the mean of the patches. sequence: their mean, weighted by a '
    'softmax of learned scores.',
  ),
  'model.positions': Key('learned', _EMBEDDING['positions'], 'Positions that are added to the tokens.'),
  'data.image_size': Key(
    0, whole(0), 'Height and width in pixels to which images are resized. 0: images keep their size.'
  ),
  'data.columns': Key(
    '',
    TEXT,
    'Names of the columns of images and classes in Parquet files, as IMAGE,LABEL. Empty: they are found by type or '
    'usual name.',
  ),
  'data.workers': Key(2, whole(0), 'Number of processes that decode images for a stream. 0: threads decode them.'),
  'data.validation_split': Key(
    '',
    TEXT,
    'Name of a labeled split to select checkpoints on, in place of a part of train. Empty: data.validation sets this '
    'part.',
  ),
  'data.stratify': Key(
    False,
    FLAG,
    'True to hold out the same fraction of every class. TFDS data sets are then read once more at the start.',
  ),
  'data.balance': Key(
    '',
    Values(str, "'', weights or sampling", lambda z: z in ('', 'weights', 'sampling')),
    'Treatment of classes with few training images. weights: their images weigh more in the loss. sampling: their '
    'images come more often, so that all classes are equally frequent. Empty: neither.',
  ),
  'data.transforms': Key(
    (('flip',), ('shift', 4)),
    ENTRIES,
    'Augmentation of training images: names with their numbers, in order. docs/reference/options.md lists all names.',
  ),
  'data.mix': Key(
    (),
    ENTRIES,
    "Mixing of pairs of training images: (('mixup', alpha, share of the images), ('cutmix', alpha, share)).",
  ),
  'data.mean': Key((), LEVELS, 'Mean of each channel, for normalization. (): measured on the training images.'),
  'data.std': Key(
    (), SPREADS, 'Standard deviation of each channel, for normalization. (): measured on the training images.'
  ),
  'evaluate.batch_size': Key(500, whole(1), 'Number of images evaluated at once.'),
  'evaluate.copies': Key(
    'none',
    one_of(COPIES),
    'Copies of each image over which outputs are averaged. mirror: the image and its mirror image. mirror_shift: '
    'also both, moved by a pixel. The scores of the averages are reported beside the usual scores.',
  ),
}
# Only for task regression.
REGRESSION = {
  'data.target_mean': Key(
    (), NUMBERS, 'Mean of each target, which is subtracted before training. (): measured on the training images.'
  ),
  'data.target_std': Key(
    (),
    Values((tuple, list), 'a number above 0 for each target, or ()', SPREADS.holds),
    'Standard deviation of each target, by which it is divided before training. (): measured on the training images.',
  ),
  'train.huber': Key(
    0.0,
    NOT_NEGATIVE,
    "Error from which Huber's loss is linear, in standard deviations of the target, such as 1.0. 0: squared error.",
  ),
}
# Keys of images that a task can't use, with the values that turn them off.
_NO_CLASSES = {'data.stratify': False, 'data.balance': '', 'train.teacher': '', 'train.teacher_weight': 0.0}
UNUSED: dict[str, dict[str, Any]] = {
  'multi_label': _NO_CLASSES,
  'regression': _NO_CLASSES | {'data.mix': (), 'train.label_smoothing': 0.0},
}
TEXTS = {
  'model.positions': Key('learned', _LANGUAGE['positions'], 'Positions that are added to the tokens.'),
  'model.tied': Key(
    True, _LANGUAGE['tied'], 'True if the weights of the head are the embedding vectors of the tokens.'
  ),
  'data.tokenizer': Key(
    'bytes', one_of(('bytes', 'characters', 'bpe')), 'Tokenizer, which splits a text into tokens.'
  ),
  'data.vocabulary': Key(4096, whole(257), 'Number of tokens that tokenizer bpe learns.'),
  'data.length': Key(256, whole(2), 'Number of tokens in a window. The model sees one window at a time.'),
  'evaluate.batch_size': Key(100, whole(1), 'Number of windows evaluated at once.'),
}
SECTIONS = ('mesh', 'model', 'data', 'train', 'optimizer', 'evaluate', 'checkpoint', 'log')


def keys(task: str) -> dict[str, Key]:
  """Return the config keys of a task by dotted name, such as 'train.epochs'. Options of the stages are left out."""
  return COMMON | (IMAGES | keys_of_task(task) if task in IMAGE_TASKS else TEXTS)


def keys_of_task(task: str) -> dict[str, Key]:
  """Return the config keys that only this one of the tasks on images has. Return {} for all tasks but regression."""
  return REGRESSION if task == 'regression' else {}


def stage_keys(model: str) -> dict[str, Key]:
  """Return the config keys of the options of a model's two stages, by dotted name, such as 'model.stage2.kernel'.

  Raises:
    UserError: there is no such model.
  """
  stages = zip(('stage1', 'stage2'), stage_options(model, None), stage_values(model), strict=True)
  return {
    f'model.{stage}.{option}': Key(
      default[option], allowed, 'Option of the stage. The docstring of its class describes it.'
    )
    for stage, default, values in stages
    for option, allowed in values.items()
  }


def defaults(task: str) -> ConfigDict:
  """Return a config of a task in which every key has its default. The options of the stages are left out."""
  config = ConfigDict({name: {} for name in SECTIONS})
  for name, key in keys(task).items():
    section, _, last = name.rpartition('.')
    part = config[section] if section else config
    part[last] = empty(key.values) if key.default is None else key.default
  config.task = task
  return config


def empty(values: Values) -> Any:
  """Return a placeholder for an empty config key, which fixes the type of the key's later value.

  The type is int if `values` are whole numbers, else float.
  """
  return config_dict.placeholder(int if values.kind is numbers.Integral else float)
