"""Weights of the authors' public code (github.com/sunrainyg/Unified_architecture, main.py: Hyper_ViT and ViT).

All versions with a HyperBF as second stage can be read. Three tensors are not in all versions: M_RBF, the bias of fc,
and a learned scale. The version of 2023-10-16 has an MLP as second stage and cannot be read.

A state_dict does not show its version, so all versions are read alike. Two early forms of the code computed something
else. From 2023-09-26 to 2023-10-08 the code did not use M_RBF. The logits are still right, because M_RBF stayed the
identity then. Before 2023-09-20 the code used the normalized class token itself as logits, and did not train the
head. For such a file, the logits here are those of the untrained head.
"""

import functools
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from hbf.errors import UserError
from hbf.interop import tensors as files
from hbf.interop.authors.layout import ORIGINS, heads_of, table_of
from hbf.interop.authors.positions import interpolate
from hbf.interop.authors.weights import NORM_EPSILON, to_tensors
from hbf.interop.network import Network, model_config, read_file, to_module
from hbf.interop.positions import square_side
from hbf.interop.table import Params, Tensors
from hbf.models.classifier import ImageClassifier
from hbf.nn.hyperbf import SIGNED

# Mean and standard deviation of the channels with which the authors normalize their images.
_CIFAR = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STATISTICS = {'cifar10': _CIFAR, 'cifar100': _CIFAR}


def load(path: str | pathlib.Path, heads: int | None = None) -> tuple[ImageClassifier, dict[str, Params]]:
  """Load a network of the authors' code as a Flax module.

  Args:
    path: a .pth, .npz or .safetensors file of the state_dict. Nothing in the file is run.
    heads: number of heads of ViT, see `hbf.interop.authors.layout.heads_of`.

  Returns:
    module and variables: `module.apply(variables, images, train=False)` returns logits [batch, classes]. Images are
    float32 [batch, height, width, 3], normalized like the training images of the network. `STATISTICS` has the means
    and the standard deviations for CIFAR.

  Raises:
    UserError: the file cannot be read, or is not a state_dict of that code. The message lists the tensors that do not
      fit.
  """
  network = read_file(pathlib.Path(path), functools.partial(read, heads=heads))
  if network.unused:
    warnings.warn(f'unused tensors of {path}: {", ".join(network.unused)}', stacklevel=2)
  return to_module(network)


def read(tensors: Tensors, heads: int | None = None) -> Network:
  """Return the network that has these tensors. `heads` and the errors are as in `load`."""
  table = table_of(tensors, heads)
  sizes, params = table.read(tensors)
  model = next(model for model, origin in ORIGINS.items() if origin == table.origin)
  stages: tuple[dict[str, Any], dict[str, Any]] = {}, {'hidden': sizes['hidden']}
  if model == 'hyperbf':
    unit = {'kernel': SIGNED, 'metric': 'bilinear', 'normalize_inputs': False, 'normalization': 'none'}
    stages = {'metric': 'bilinear', 'sigma_per': 'layer'}, {'centers': sizes['hidden'], **unit}
  heads = heads_of(model, sizes['D'], sizes['d'], heads)
  return Network(
    origin=table.origin,
    config=model_config(
      model, sizes, *stages, heads=heads, pool='cls', positions='learned', norm_epsilon=NORM_EPSILON
    ),
    params=params,
    channels=sizes['channels'],
    classes=sizes['classes'],
    patches=square_side(sizes['N'] - 1) ** 2,
    resize=interpolate,
    # ViT's attention has an M too, but does not use it. This M is an identity of side 192 for every width.
    unused=tuple(name for name in tensors if model == 'vit' and name.endswith('.attn.M')),
  )


def save(
  path: str | pathlib.Path,
  module: ImageClassifier,
  variables: Mapping[str, Any],
  *,
  metric: bool = True,
  bias: bool = True,
) -> None:
  """Write a network as a state_dict of the authors' code.

  The authors' code then computes the same function. `hbf.interop.authors.weights.check_form` must accept the network.
  It accepts all networks from `load`.

  Args:
    path: a .pth, .npz or .safetensors file.
    module: a network of model hyperbf or vit.
    variables: {'params': …}.
    metric: True if the version of Hyper_ViT that will read the file has an M_RBF.
    bias: True if the layer fc of that version has a bias.

  Raises:
    UserError: the authors' code cannot compute the network's function, or the file cannot be written.
  """
  params = jax.tree.map(lambda z: np.asarray(z, np.float64), dict(variables['params']))
  tensors = to_tensors(params, module)
  for wanted, ending, default in ((metric, '.mlp.M_RBF', np.eye), (bias, '.mlp.fc.bias', np.zeros)):
    for name in [name for name in tensors if name.endswith(ending) and not wanted]:
      if np.any(tensors[name] != default(len(tensors[name]))):
        raise UserError(f'{name} changes the network: it cannot be left out')
      del tensors[name]
  files.write(pathlib.Path(path), tensors)
