"""Recipes, sizes and named models. Defaults, ranges and meanings of all keys stand in hbf/config/defaults.py.

A data set in hbf/config/datasets.py calls `make_config`. Arguments choose model, recipe and size.

--config=cifar10:model=vit,recipe=memo            arguments: model, recipe, size
--config.optimizer.learning_rate=3e-4             then any key of hbf/config/defaults.py, or option of a stage
"""

from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from hbf.config.defaults import defaults as all_defaults
from hbf.errors import UserError, choose
from hbf.nn.registry import stage_options

# Width, blocks, heads and expansion of the usual vision transformers (Touvron et al. 2021, Table 1; the largest:
# Dosovitskiy et al. 2021, Table 1).
SIZES = {
  'tiny': (192, 12, 3, 4.0),
  'small': (384, 12, 6, 4.0),
  'base': (768, 12, 12, 4.0),
  'large': (1024, 24, 16, 4.0),
}
# Those of models with sizes of their own: Liu et al. 2021, Table 1 (d_ffn is twice the units); Tolstikhin et al.
# 2021, Table 1. They have no heads.
GMLP_SIZES = {'tiny': (128, 30, 1, 3.0), 'small': (256, 30, 1, 3.0), 'base': (512, 30, 1, 3.0)}
SIZES_OF = {
  'gmlp': GMLP_SIZES,
  'amlp': GMLP_SIZES,
  'mixer': {'small': (512, 8, 1, 4.0), 'base': (768, 12, 1, 4.0)},
}


def memo() -> ConfigDict:
  """CBMM Memo 143 on CIFAR: all of train, no warm-up, no model selection, the last test figure."""
  config = defaults()
  config.model.update(width=768, depth=4, heads=4)
  config.data.validation = 0.0
  config.train.update(epochs=100.0, batch_size=256)
  config.optimizer.update(learning_rate=1e-4, weight_decay=0.01, schedule='cosine', warmup='0steps', clip=0.0)
  config.model.expansion = 2.0  # 1,536 centers, close to the 1,500 of the authors' first version
  return config


def small() -> ConfigDict:
  """Set a recipe for a laptop: minutes on two CPU cores."""
  config = defaults()
  # Fixed positions: a few epochs are too short to learn where a patch is from a start near 0.
  config.model.update(width=64, depth=4, heads=4, positions='sincos2d')
  config.optimizer.learning_rate = 2e-3
  config.train.update(epochs=3.0, batch_size=256)
  config.model.expansion = 4.0
  return config


def laptop() -> ConfigDict:
  """Set a recipe for an hour of one CPU core on CIFAR-10, for models with at most 0.3 M parameters."""
  config = small()
  config.model.update(heads=8, stem='conv', pool='sequence')
  config.stages.stage1 = {'relative_positions': 'gaussian'}
  # At a rate as high as this one, responses that are normed become a table (docs/search.md).
  config.stages.stage2 = {
    'normalize_inputs': True,
    'norm_affine': False,
    'normalization': 'none',
    'sigma_per': 'layer',
  }
  config.optimizer.learning_rate = 8e-3  # the best for every arm after two epochs, docs/search.md
  config.train.epochs = 20.0
  return config


def strong() -> ConfigDict:
  """Set a recipe for a GPU: 300 passes of a model of 2.8 M parameters, with the sizes and tricks of Lee et al. 2021.

  Their 100 epochs show every image three times. RandAugment stands for their AutoAugment.
  """
  config = defaults()
  config.model.update(width=192, depth=9, heads=12, stem='conv', pool='sequence', positions='sincos2d')
  config.model.update(drop_path=0.1, dtype='bfloat16')
  config.stages.stage1 = {'relative_positions': 'gaussian'}
  config.data.transforms = (('flip',), ('shift', 4), ('rand_augment', 2, 9), ('erase', 0.25))
  config.data.mix = (('mixup', 1.0, 0.25), ('cutmix', 1.0, 0.25))
  config.train.update(epochs=300.0, batch_size=128, label_smoothing=0.1, average=0.9995)
  config.optimizer.update(warmup='10epochs', minimum_rate=0.01)
  config.model.expansion = 2.0
  return config


def finetune() -> ConfigDict:
  """Set a recipe that starts from weights of others, `init_from`.

  `size` and the options of the model must describe these weights.
  """
  config = defaults()
  config.model.update(width=192, depth=12, heads=3, patch=16, drop_path=0.1)
  config.data.transforms = (('flip',), ('resized_crop', 0.4), ('rand_augment', 2, 9))
  config.data.mix = (('mixup', 0.8, 0.5), ('cutmix', 1.0, 0.5))
  config.train.update(epochs=20.0, batch_size=128, label_smoothing=0.1)
  config.optimizer.update(learning_rate=5e-4, warmup='10%', layer_decay=0.75, minimum_rate=0.01)
  config.model.expansion = 4.0
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
  config.model.expansion = 4.0
  return config


def characters() -> ConfigDict:
  """Set a recipe for texts by characters: nanoGPT's run on a CPU (Karpathy 2023), two minutes on two cores."""
  config = text_defaults()
  config.model.update(width=128, depth=4, heads=4)
  config.data.update(tokenizer='characters', length=64, validation=0.0)
  config.train.update(epochs=1.53, batch_size=12)  # 2,000 steps of tiny Shakespeare
  # nanoGPT's, but for its rate of 1e-3: twice that is better for its GPT too.
  config.optimizer.update(learning_rate=2e-3, minimum_rate=0.1, warmup='100steps', weight_decay=0.1)
  config.optimizer.second_momentum = 0.99
  config.log.every = '100steps'
  # As in recipe laptop; places above all (docs/text.md).
  config.stages.stage1 = {'relative_positions': 'gaussian'}
  config.stages.stage2 = {
    'normalize_inputs': True,
    'norm_affine': False,
    'normalization': 'none',
    'sigma_per': 'layer',
  }
  config.model.expansion = 4.0
  return config


RECIPES = {'memo': memo, 'small': small, 'laptop': laptop, 'strong': strong, 'finetune': finetune, 'plain': plain}


TEXT_RECIPES = {'characters': characters}


def defaults(task: str = 'classification') -> ConfigDict:
  """Return every default, and room for the options of whichever stage has them, see `make_config`."""
  config = all_defaults(task)
  config.stages = ConfigDict({'stage1': {}, 'stage2': {}})
  return config


def text_defaults() -> ConfigDict:
  """Return what the recipes for texts have in common."""
  return defaults('next_token')


def named_options(name: str) -> dict[str, Any]:
  """Return what a named model sets of the `model` part, beside its two stages; None is left to `resolve`."""
  # As published: no class token, and what mixes the tokens knows their places.
  patches_only = {'pool': 'mean', 'positions': 'none'}
  options: dict[str, dict[str, Any]] = {
    'unified': {'stage1': {'memory': None}},
    'gmlp': patches_only,
    'amlp': {**patches_only, 'stage1': {'attention': 64}},
    'mixer': {**patches_only, 'stage2': {'activation': 'gelu'}},
    # A class token would see no patch, or not be one.
    'pooling': {'pool': 'mean'},
    'identity': {'pool': 'mean'},
  }
  return options.get(name, {})


def make_text_config(arguments: str, data: dict[str, Any], **overrides: dict[str, Any]) -> ConfigDict:
  """Return the config of a run on texts. Arguments are as in `make_config`."""
  return _make_config(arguments, TEXT_RECIPES, 'characters', data, overrides)


def make_config(arguments: str, data: dict[str, Any], **overrides: dict[str, Any]) -> ConfigDict:
  """Return the config of a run on images.

  Args:
    arguments: 'model=…,recipe=…,size=…', each optional.
    data: the `data` keys of the data set.
    **overrides: sections with keys that this data set sets otherwise, for every recipe.

  Raises:
    UserError: an argument or value is unknown.
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
  stages = config.stages
  del config.stages
  if given['size']:
    sizes = SIZES_OF.get(given['model'], SIZES)
    width, depth, heads, expansion = choose('size', given['size'], sizes)
    config.model.update(width=width, depth=depth, heads=heads, expansion=expansion)
  named = named_options(config.model.name)
  config.model.update({key: value for key, value in named.items() if key in config.model})
  # An MLP's unit costs 2D + 1 parameters, a center with its width as many: the models of a recipe match.
  for stage, options in zip(('stage1', 'stage2'), stage_options(config.model.name, None), strict=True):
    for changes in (named.get(stage, {}), stages[stage]):
      options.update({key: value for key, value in changes.items() if key in options})
    config.model[stage] = {key: placeholder(int) if value is None else value for key, value in options.items()}
  return config.lock()
