"""Every default of every run but those of the stages, which stand on the fields of their classes in hbf/nn.

A data set's file calls `make_config`; arguments choose model, recipe and size.

--config=configs/cifar10.py:model=vit,recipe=memo        arguments: model, recipe, size
--config.optimizer.learning_rate=3e-4                    then any key below
"""

from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from hbf.errors import UserError, choose
from hbf.nn.registry import stage_options

# Width, blocks, heads and hidden units of the usual vision transformers (Touvron et al. 2021, Table 1; the largest:
# Dosovitskiy et al. 2021, Table 1).
SIZES = {
  'tiny': (192, 12, 3, 768),
  'small': (384, 12, 6, 1536),
  'base': (768, 12, 12, 3072),
  'large': (1024, 24, 16, 4096),
}
# Those of models with sizes of their own: Liu et al. 2021, Table 1 (d_ffn is twice `hidden`); Tolstikhin et al. 2021,
# Table 1. They have no heads.
GMLP_SIZES = {'tiny': (128, 30, 1, 384), 'small': (256, 30, 1, 768), 'base': (512, 30, 1, 1536)}
SIZES_OF = {
  'gmlp': GMLP_SIZES,
  'amlp': GMLP_SIZES,
  'mixer': {'small': (512, 8, 1, 2048), 'base': (768, 12, 1, 3072)},
}


def memo() -> ConfigDict:
  """CBMM Memo 143 on CIFAR: all of train, no warm-up, no model selection, the last test figure."""
  config = defaults()
  config.model.update(width=768, depth=4, heads=4)
  config.data.validation = 0.0
  config.train.update(epochs=100.0, batch_size=256)
  config.optimizer.update(learning_rate=1e-4, weight_decay=0.01, schedule='cosine', warmup='0steps', clip=0.0)
  config.hidden = 2 * 768  # close to the 1,500 centres of the authors' first version
  return config


def small() -> ConfigDict:
  """A laptop's: minutes on two CPU cores."""
  config = defaults()
  # Fixed positions: a few epochs are too short to learn where a patch is from a start near 0.
  config.model.update(width=64, depth=4, heads=4, positions='sincos2d')
  config.optimizer.learning_rate = 2e-3
  config.train.update(epochs=3.0, batch_size=256)
  config.hidden = 4 * 64
  return config


def laptop() -> ConfigDict:
  """An hour of one CPU core for CIFAR-10, of models with at most 0.3 M parameters."""
  config = small()
  config.model.update(heads=8, stem='conv', pool='sequence')
  config.stages.stage1 = {'places': 'offsets'}
  # At a rate as high as this one, responses that are normed become a table (docs/search.md).
  config.stages.stage2 = {'norm': 'unit', 'norm_affine': False, 'normalisation': 'none', 'widths': 'layer'}
  config.optimizer.learning_rate = 8e-3  # the best for every arm after two epochs, docs/search.md
  config.train.epochs = 20.0
  return config


def strong() -> ConfigDict:
  """A GPU's: 300 passes of a model of 2.8 M parameters, of the sizes and with the tricks of Lee et al. 2021.

  Their 100 epochs show every image three times. RandAugment stands for their AutoAugment.
  """
  config = defaults()
  config.model.update(width=192, depth=9, heads=12, stem='conv', pool='sequence', positions='sincos2d')
  config.model.update(drop_path=0.1, dtype='bfloat16')
  config.stages.stage1 = {'places': 'offsets'}
  config.data.transforms = (('flip',), ('shift', 4), ('rand_augment', 2, 9), ('erase', 0.25))
  config.data.mix = (('mixup', 1.0, 0.25), ('cutmix', 1.0, 0.25))
  config.train.update(epochs=300.0, batch_size=128, label_smoothing=0.1, average=0.9995)
  config.optimizer.update(warmup='10epochs', minimum_rate=0.01)
  config.hidden = 2 * 192
  return config


def finetune() -> ConfigDict:
  """From weights of others, `init_from`; `size` and the options of the model say what these are."""
  config = defaults()
  config.model.update(width=192, depth=12, heads=3, patch=16, drop_path=0.1)
  config.data.transforms = (('flip',), ('resized_crop', 0.4), ('rand_augment', 2, 9))
  config.data.mix = (('mixup', 0.8, 0.5), ('cutmix', 1.0, 0.5))
  config.train.update(epochs=20.0, batch_size=128, label_smoothing=0.1)
  config.optimizer.update(learning_rate=5e-4, warmup='10%', layer_decay=0.75, minimum_rate=0.01)
  config.hidden = 4 * 192
  return config


def plain() -> ConfigDict:
  """ImageNet's, on accelerators: 90 passes, after Beyer et al. 2022 ("Better plain ViT baselines for ImageNet-1k").

  Their crops take 5% of a whole image and more; a crop here is of a square of `data.image_size`, so it takes 25%.
  """
  config = defaults()
  config.model.update(width=768, depth=12, heads=12, patch=16, pool='mean', positions='sincos2d', dtype='bfloat16')
  config.data.transforms = (('flip',), ('resized_crop', 0.25), ('rand_augment', 2, 10))
  config.data.mix = (('mixup', 0.2, 1.0),)
  config.data.validation = 0.01
  config.train.update(epochs=90.0, batch_size=1024)
  config.optimizer.update(weight_decay=0.1, warmup='8epochs')
  config.hidden = 4 * 768
  return config


def characters() -> ConfigDict:
  """A laptop's, for texts by characters: nanoGPT's run on a CPU (Karpathy 2023), two minutes on two cores."""
  config = text_defaults()
  config.model.update(width=128, depth=4, heads=4)
  config.data.update(tokenizer='characters', length=64, validation=0.0)
  config.train.update(epochs=1.53, batch_size=12)  # 2,000 steps of tiny Shakespeare
  # nanoGPT's, but for its rate of 1e-3: twice that is better for its GPT too.
  config.optimizer.update(learning_rate=2e-3, minimum_rate=0.1, warmup='100steps', weight_decay=0.1)
  config.optimizer.second_momentum = 0.99
  config.log.every = '100steps'
  # As in recipe laptop; places above all (docs/text.md).
  config.stages.stage1 = {'places': 'offsets'}
  config.stages.stage2 = {'norm': 'unit', 'norm_affine': False, 'normalisation': 'none', 'widths': 'layer'}
  config.hidden = 4 * 128
  return config


RECIPES = {'memo': memo, 'small': small, 'laptop': laptop, 'strong': strong, 'finetune': finetune, 'plain': plain}


TEXT_RECIPES = {'characters': characters}


def defaults() -> ConfigDict:
  """What the recipes for images have in common, and the place where every key is explained."""
  config = ConfigDict()
  config.stages = ConfigDict({'stage1': {}, 'stage2': {}})  # options for whichever stage has them, see make_config
  config.task = 'classification'  # of images
  config.recipe = ''
  config.seed = 0
  config.init_from = ''  # file of weights of Google's, timm's or the authors' code to start from; '': fresh ones

  config.mesh = ConfigDict()  # devices along each axis of their mesh, docs/devices.md; -1: as many as are left
  config.mesh.data = -1  # have the parameters each
  config.mesh.fsdp = 1  # share them, as they share the batch
  config.mesh.tensor = 1  # share heads, hidden units and centres

  config.model = ConfigDict()
  config.model.name = ''  # a name in hbf/nn/registry.py, or any pair as STAGE1+STAGE2, such as softmax+hyperbf
  config.model.width = 0
  config.model.depth = 0
  config.model.heads = 0  # of stage 1, if it has heads
  config.model.patch = 4  # pixels
  config.model.stem = 'patch'  # patch: a linear map of its pixels; conv: convolutions of 3×3 down to it
  config.model.whiten = False  # fix the first convolution of stem conv to what makes the first batch's patches white
  config.model.pool = 'cls'  # cls, mean, sequence: mean weighted by a learned score
  config.model.positions = 'learned'  # learned, sincos2d, none
  config.model.dropout = 0.0
  config.model.dtype = 'float32'  # of the products: float32, bfloat16
  config.model.norm_epsilon = 1e-6  # added to the variance in each LayerNorm
  config.model.scan_layers = False  # loop over one block: a program that doesn't grow with depth; slower on a CPU
  config.model.parallel = False  # both stages read the block's input
  config.model.layer_scale = 0.0  # start of a learned factor on each channel of each stage's output; 0: none
  config.model.drop_path = 0.0  # stochastic depth: rate in the last block, linear from 0 in the first
  config.model.merge = 0  # block before which 2×2 tokens become one of twice the width; 0: one resolution
  config.model.remat = False  # compute blocks again in the backward pass: less memory; on a CPU only if scanned

  config.data = ConfigDict()
  config.data.name = ''
  config.data.dir = '~/tensorflow_datasets'  # where TFDS data lie, prepared; a bucket works too
  config.data.root = ''  # image_folder: the folder with train/CLASS/* and test/CLASS/*; text_file: file or folder
  config.data.test_split = 'test'  # name of the labelled split to test on; TFDS's ImageNet: validation
  config.data.image_size = 0  # images are resized to this square; 0: as stored
  config.data.download = False  # may fetch the official archive
  config.data.input = 'auto'  # device (whole set in device memory), stream (Grain), auto (by size)
  config.data.resident_bytes = 2_000_000_000  # auto: larger sets are streamed
  config.data.workers = 2  # processes that decode images for the stream
  config.data.validation = 0.02  # part of train held out to select checkpoints
  config.data.stratify = False  # hold out the same part of every class; TFDS data are read once more for it
  config.data.transforms = (('flip',), ('shift', 4))  # of training images, in order; docs/options.md has all
  config.data.mix = ()  # of pairs of images: (('mixup', alpha, share of the images), ('cutmix', alpha, share))
  config.data.mean = ()  # of the channels, in 0..1; empty: measured on train
  config.data.std = ()

  config.train = ConfigDict()
  config.train.epochs = 0.0
  config.train.batch_size = 0
  # Most steps that the devices are asked for at once; a signal waits until they have taken them. 0: 10, but 1 from a
  # stream, where they need as many batches of images at once, and 1 on a CPU, whose steps are long.
  config.train.steps_per_call = 0
  config.train.accumulate = 1  # parts of a batch computed one after another, to save memory
  config.train.label_smoothing = 0.0
  config.train.average = 0.0  # decay of a moving average of the parameters, evaluated beside them; 0: none

  config.optimizer = ConfigDict()
  config.optimizer.name = 'adamw'  # adamw, muon (matrices of the blocks; adamw for the rest), sgd, lion
  config.optimizer.learning_rate = 1e-3  # at the peak
  config.optimizer.schedule = 'cosine'  # cosine, linear, constant, wsd (constant, then linear over the last `decay`)
  config.optimizer.minimum_rate = 0.0  # learning rate at the end of all but constant, over that at the peak
  config.optimizer.decay = '20%'  # length of wsd's decay at the end of the run; the other schedules ignore it
  config.optimizer.warmup = '5%'
  config.optimizer.weight_decay = 0.05  # of kernels, centres and coefficients
  config.optimizer.momentum = 0.9  # first moment
  config.optimizer.second_momentum = 0.999  # second moment of adamw
  config.optimizer.matrix_momentum = 0.95  # of muon's matrices
  config.optimizer.clip = 1.0  # global norm of the gradient; 0: off
  config.optimizer.width_rate = 1.0  # learning rate of the widths, σ or 1/2σ², over that of the rest
  config.optimizer.centre_rate = 1.0  # likewise of learned centres; set to √D in make_config
  config.optimizer.layer_decay = 1.0  # factor on the learning rate for each block below the head

  config.evaluate = ConfigDict()
  config.evaluate.every = '1epoch'  # on the held-out part of train
  config.evaluate.batch_size = 500
  config.evaluate.copies = 'none'  # mirror, mirror_shift: figures of outputs averaged over copies of images, beside

  config.checkpoint = ConfigDict()
  config.checkpoint.every = '1epoch'
  config.checkpoint.keep = 2  # latest; the best by the first figure of the task on what is held out is kept too

  config.log = ConfigDict()
  config.log.every = '50steps'
  config.log.tensorboard = False
  return config


def text_defaults() -> ConfigDict:
  """What the recipes for texts have in common: `defaults`, less what images alone have, and what texts alone have."""
  config = defaults()
  config.task = 'next_token'  # or masked_token
  for key in ('patch', 'stem', 'whiten', 'pool', 'merge'):
    del config.model[key]
  config.model.positions = 'learned'  # learned, sincos, none
  config.model.tied = True  # the head's weights are the vectors of the tokens
  for key in ('image_size', 'input', 'resident_bytes', 'workers', 'transforms', 'mix', 'mean', 'std', 'stratify'):
    del config.data[key]
  config.data.tokenizer = 'bytes'  # bytes, characters, bpe
  config.data.vocabulary = 4096  # tokens that bpe learns
  config.data.length = 256  # tokens of a window: what the model sees at once
  config.evaluate.batch_size = 100
  del config.evaluate.copies
  return config


def named_options(name: str, hidden: int) -> dict[str, Any]:
  """What a named model sets of the `model` part, beside its two stages."""
  # As published: no class token, and what mixes the tokens knows their places.
  patches_only = {'pool': 'mean', 'positions': 'none'}
  options: dict[str, dict[str, Any]] = {
    'unified': {'stage1': {'memory': hidden}},
    'gmlp': patches_only,
    'amlp': {**patches_only, 'stage1': {'attention': 64}},
    'mixer': {**patches_only, 'stage2': {'activation': 'gelu'}},
    # A class token would see no patch, or not be one.
    'pooling': {'pool': 'mean'},
    'identity': {'pool': 'mean'},
  }
  return options.get(name, {})


def make_text_config(arguments: str, data: dict[str, Any], **overrides: dict[str, Any]) -> ConfigDict:
  """The config of a run on texts; see `make_config`."""
  return _make_config(arguments, TEXT_RECIPES, 'characters', data, overrides)


def make_config(arguments: str, data: dict[str, Any], **overrides: dict[str, Any]) -> ConfigDict:
  """The config of a run on images.

  Args:
    arguments: 'model=…,recipe=…,size=…', each optional.
    data: the `data` keys of the data set.
    **overrides: sections with their keys that this data set wants otherwise, whatever the recipe.

  Raises:
    UserError: an unknown argument or value.
  """
  return _make_config(arguments, RECIPES, 'small', data, overrides)


def _make_config(
  arguments: str, recipes: Mapping[str, Callable], default: str, data: dict[str, Any], overrides: dict[str, Any]
) -> ConfigDict:
  given = {'model': 'hyperbf', 'recipe': default, 'size': ''}
  for part in filter(None, arguments.split(',')):
    key, _, value = part.partition('=')
    choose('config argument', key, {name: name for name in given})
    if not value:
      raise UserError(f'config argument {part!r} needs a value: {key}=VALUE')
    given[key] = value
  config = choose('recipe', given['recipe'], recipes)()
  config.recipe = given['recipe']
  config.model.name = given['model']
  config.data.update(data)
  for section, values in overrides.items():
    config[section].update(values)
  hidden, stages = config.hidden, config.stages
  del config.hidden, config.stages
  if given['size']:
    sizes = SIZES_OF.get(given['model'], SIZES)
    width, depth, heads, hidden = choose('size', given['size'], sizes)
    config.model.update(width=width, depth=depth, heads=heads)
  # Adam moves every number by about the learning rate. Centres start at size 1, the weights of an MLP at 1/√D: the
  # same relative steps need √D times the rate.
  config.optimizer.centre_rate = config.model.width**0.5
  # An MLP's unit costs 2D + 1 parameters, a centre with its width as many: the models of a recipe match.
  config.model.stage1, config.model.stage2 = map(ConfigDict, stage_options(config.model.name, hidden))
  named = named_options(config.model.name, hidden)
  config.model.update({key: value for key, value in named.items() if key in config.model})
  for stage, options in stages.items():
    config.model[stage].update({key: value for key, value in options.items() if key in config.model[stage]})
  return config.lock()
