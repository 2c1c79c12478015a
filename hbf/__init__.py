"""Homogeneous transformers whose units are HyperBF."""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

__version__ = '0.2.0'

if TYPE_CHECKING:
  from hbf import interop as interop
  from hbf.api import Run as Run
  from hbf.api import edit as edit
  from hbf.api import evaluate as evaluate
  from hbf.api import get_config as get_config
  from hbf.api import learn as learn
  from hbf.api import load as load
  from hbf.api import load_pretrained as load_pretrained
  from hbf.api import train as train
  from hbf.config.datasets import register_dataset as register_dataset
  from hbf.data.images.arrays import ArrayData as ArrayData
  from hbf.data.images.dataset import Dataset as Dataset
  from hbf.data.registry import DataRequest as DataRequest
  from hbf.errors import UserError as UserError
  from hbf.models.build import count_parameters as count_parameters
  from hbf.models.classifier import ImageClassifier as ImageClassifier
  from hbf.models.embedding import PatchEmbedding as PatchEmbedding
  from hbf.models.language import LanguageModel as LanguageModel
  from hbf.nn.baselines.mlp import MLP as MLP
  from hbf.nn.baselines.softmax import SoftmaxAttention as SoftmaxAttention
  from hbf.nn.block import Block as Block
  from hbf.nn.context import Context as Context
  from hbf.nn.gated import GatedHyperBF as GatedHyperBF
  from hbf.nn.hyperbf import HyperBFAttention as HyperBFAttention
  from hbf.nn.hyperbf import HyperBFCenters as HyperBFCenters
  from hbf.nn.positional import PositionalHyperBF as PositionalHyperBF
  from hbf.nn.trunk import Trunk as Trunk
  from hbf.ops.api import BALL_KERNELS as BALL_KERNELS
  from hbf.ops.api import KERNELS as KERNELS
  from hbf.ops.api import NORMALIZATIONS as NORMALIZATIONS
  from hbf.ops.api import hyperbf as hyperbf

# The public names (docs/reference/api.md), each with its module and its name there. A name is imported when it is
# first used, so `import hbf` loads neither JAX nor the readers of data sets. The imports above are for editors and
# type checkers. A test compares them to these names.
_PUBLIC = {
  # The operator.
  'hyperbf': ('hbf.ops.api', 'hyperbf'),
  'KERNELS': ('hbf.ops.api', 'KERNELS'),
  'BALL_KERNELS': ('hbf.ops.api', 'BALL_KERNELS'),
  'NORMALIZATIONS': ('hbf.ops.api', 'NORMALIZATIONS'),
  # Modules for a model of your own.
  'Block': ('hbf.nn.block', 'Block'),
  'Context': ('hbf.nn.context', 'Context'),
  'HyperBFAttention': ('hbf.nn.hyperbf', 'HyperBFAttention'),
  'HyperBFCenters': ('hbf.nn.hyperbf', 'HyperBFCenters'),
  'PositionalHyperBF': ('hbf.nn.positional', 'PositionalHyperBF'),
  'GatedHyperBF': ('hbf.nn.gated', 'GatedHyperBF'),
  'SoftmaxAttention': ('hbf.nn.baselines.softmax', 'SoftmaxAttention'),
  'MLP': ('hbf.nn.baselines.mlp', 'MLP'),
  'Trunk': ('hbf.nn.trunk', 'Trunk'),
  # Whole models.
  'ImageClassifier': ('hbf.models.classifier', 'ImageClassifier'),
  'PatchEmbedding': ('hbf.models.embedding', 'PatchEmbedding'),
  'LanguageModel': ('hbf.models.language', 'LanguageModel'),
  'count_parameters': ('hbf.models.build', 'count_parameters'),
  # Data sets of your own.
  'ArrayData': ('hbf.data.images.arrays', 'ArrayData'),
  'Dataset': ('hbf.data.images.dataset', 'Dataset'),
  'DataRequest': ('hbf.data.registry', 'DataRequest'),
  'register_dataset': ('hbf.config.datasets', 'register_dataset'),
  # Runs.
  'get_config': ('hbf.api', 'get_config'),
  'train': ('hbf.api', 'train'),
  'evaluate': ('hbf.api', 'evaluate'),
  'load': ('hbf.api', 'load'),
  'load_pretrained': ('hbf.api', 'load_pretrained'),
  'edit': ('hbf.api', 'edit'),
  'learn': ('hbf.api', 'learn'),
  'Run': ('hbf.api', 'Run'),
  'UserError': ('hbf.errors', 'UserError'),
}
__all__ = [*sorted(_PUBLIC)]
# Packages of functions that stay under their package's name, such as `hbf.interop.google.load`.
_PACKAGES = ('interop',)

# With this setting, random numbers are functions of their keys alone. They do not depend on the number of devices,
# and a new transform does not change the random numbers of other transforms (`hbf.data.augment.transforms`). JAX
# reads the variable when JAX is imported. Importing JAX here would take too long for `hbf --help`.
os.environ['JAX_THREEFRY_PARTITIONABLE'] = 'true'
if 'jax' in sys.modules:
  sys.modules['jax'].config.update('jax_threefry_partitionable', True)


def __getattr__(name: str) -> Any:
  """Import a public name or package at its first use (PEP 562)."""
  if name in _PACKAGES:
    return importlib.import_module(f'hbf.{name}')
  if name not in _PUBLIC:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  module, own_name = _PUBLIC[name]
  value = globals()[name] = getattr(importlib.import_module(module), own_name)
  return value


def __dir__() -> list[str]:
  return __all__
