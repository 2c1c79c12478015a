"""Comparisons by name: which configs, arms and seeds, and what others report of them."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Arguments of compare.py.

  Attributes:
    configs: as --config.
    arms: as --arm; the first is the reference for differences and parameters.
    seeds: of the runs.
    overrides: as --config.KEY=VALUE, for all arms.
    published: test accuracy in percent by 'data/label'.
  """

  configs: tuple[str, ...]
  arms: tuple[str, ...]
  seeds: tuple[int, ...]
  overrides: tuple[str, ...] = ()
  published: Mapping[str, float] = dataclasses.field(default_factory=dict)


PRESETS = {
  # CBMM Memo 143, Table 2: one seed, 100 epochs, the best test epoch.
  'memo': Comparison(
    configs=tuple(f'configs/{data}.py:recipe=memo' for data in ('cifar10', 'cifar100', 'tiny_imagenet')),
    arms=('vit', 'hyperbf'),
    seeds=(0, 1, 2),
    published={
      'cifar10/vit': 75.61,
      'cifar10/hyperbf': 75.12,
      'cifar100/vit': 49.90,
      'cifar100/hyperbf': 48.30,
      'tiny_imagenet/vit': 32.03,
      'tiny_imagenet/hyperbf': 31.14,
    },
  ),
  # A laptop's: an hour or two on two cores.
  'small': Comparison(
    configs=('configs/cifar10.py:recipe=small',),
    arms=('vit', 'vit-gelu: vit model.stage2.activation=gelu', 'hyperbf'),
    seeds=(0, 1, 2),
    overrides=('--config.train.epochs=5.0',),
  ),
  # Every model, its means read out, as some have no class token. Two hours on two cores.
  'rivals': Comparison(
    configs=('configs/cifar10.py:recipe=small',),
    arms=(
      'vit',
      'hyperbf',
      'unified',
      'gmlp',
      'amlp',
      'mixer',
      'linear',
      'linear-gaussian: linear model.stage1.features=gaussian',
      'pooling',
      'identity',
      'vit-gelu: vit model.stage2.activation=gelu',
      'vit-swiglu: vit model.stage2.activation=swiglu',
      'vit-unit: vit model.stage1.qk_norm=unit',
      'softmax+hyperbf',
      'hyperbf+mlp',
      'hyperbf-heads: hyperbf model.stage2.heads=4',
      'hyperbf-nearest: hyperbf model.stage2.nearest=16',
      'hyperbf-nested: hyperbf model.stage2.nested=True',
    ),
    seeds=(0, 1),
    overrides=('--config.model.pool=mean', '--config.train.epochs=2.0'),
  ),
}
