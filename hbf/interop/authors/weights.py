"""Conversion of networks to the layout of the authors' code, see `hbf.interop.authors.layout`."""

from typing import Any

import flax.linen as nn
import numpy as np

from hbf.errors import UserError
from hbf.interop.authors.layout import scaled_queries
from hbf.interop.table import Params
from hbf.models.classifier import ImageClassifier
from hbf.nn.baselines.mlp import MLP
from hbf.nn.baselines.softmax import SoftmaxAttention
from hbf.nn.hyperbf import SIGNED, HyperBFAttention, HyperBFCenters

NORM_EPSILON = 1e-5  # PyTorch's


def to_tensors(params: Params, model: ImageClassifier) -> dict[str, np.ndarray]:
  """Return tensors in the layout of the authors' code. For Hyper_ViT they include the optional M_RBF and bias of fc.

  Raises:
    UserError: the authors' code cannot compute the model's function.
  """
  stage1, stage2 = check_form(model)
  count, width = params['positions'].shape
  if round(count**0.5) ** 2 != count:
    raise UserError(f"the authors' code needs positions of a square of patches, and here are {count}")
  patch = model.embed.patch
  patches = params['embedding']['kernel'].reshape(patch, patch, -1, width)
  tensors = {
    'cls_token': params['class_token'],
    'pos_embed': np.concatenate([np.zeros((1, width)), params['positions']])[None],
    'patch_embed.proj.weight': patches.transpose(3, 2, 0, 1),
    'patch_embed.proj.bias': params['embedding']['bias'],
    **_from_norm('norm', params['norm']),
    **_from_dense('head', params['head']),
  }
  for i in range(model.trunk.depth):
    ours = params[f'block{i}']
    block = {
      **_from_norm('norm1', ours['norm_stage1']),
      **_from_stage(ours['stage1'], stage1),
      **_from_norm('norm2', ours['norm_stage2']),
      **_from_stage(ours['stage2'], stage2),
    }
    tensors |= {f'blocks.{i}.{name}': tensor for name, tensor in block.items()}
  return tensors


def check_form(model: ImageClassifier) -> tuple[nn.Module, nn.Module]:
  """Check that the authors' code can compute a model. Return the model's two stages.

  Raises:
    UserError: the model has options that the authors' code does not have. The message lists them.
  """
  if not isinstance(model, ImageClassifier):
    raise UserError(
      f'the network is of type {type(model).__name__}; expected an ImageClassifier: load a run on images without '
      'edits and learned classes'
    )
  stage1, stage2 = model.trunk.stage1(), model.trunk.stage2() if model.trunk.stage2 else None
  kinds = (type(stage1), type(stage2))
  if stage2 is None or kinds not in ((HyperBFAttention, HyperBFCenters), (SoftmaxAttention, MLP)):
    raise UserError("the authors' code has the models hyperbf and vit, and no other pair of stages")
  needed = needed_options(stage2)
  owners: dict[str, nn.Module] = {'embed': model.embed, 'trunk': model.trunk, 'stage1': stage1, 'stage2': stage2}
  options = {key: getattr(owners[key.split('.')[0]], key.split('.')[1]) for key in needed}
  keys = {key: f'model.{key}'.replace('embed.', '').replace('trunk.', '') for key in needed}  # as in a config
  wrong = [f'{keys[key]} {needed[key]!r}, not {value!r}' for key, value in options.items() if value != needed[key]]
  wrong += [
    f'learned model.{key}.sigma_per' for key, stage in owners.items() if getattr(stage, 'sigma_per', '') == 'fixed'
  ]
  if wrong:
    raise UserError(f"the authors' code needs {', '.join(wrong)}")
  return stage1, stage2


def needed_options(stage2: nn.Module) -> dict[str, Any]:
  """Return the options of a model that the authors' code needs, with their values, from the model's stage 2.

  The code can compute the model with any values of the other options.
  """
  needed = {
    'embed.pool': 'cls',
    'embed.positions': 'learned',
    'embed.stem': 'patch',
    'embed.whiten': False,
    'trunk.norm_epsilon': NORM_EPSILON,
    'trunk.parallel': False,
    'trunk.layer_scale': 0.0,
    'trunk.merge': (),
    'trunk.window': 0,
    'stage1.relative_positions': 'none',
    'stage1.qk_norm': False,
  }
  if not isinstance(stage2, HyperBFCenters):
    return needed | {'stage1.qkv_bias': False, 'stage2.activation': 'relu', 'stage2.normalize': False}
  needed |= {'stage1.kernel': 'gaussian', 'stage1.memory': 0}
  needed |= {'stage2.kernel': SIGNED if stage2.kernel == SIGNED else 'gaussian', 'stage2.heads': 1}
  needed |= {'stage2.normalize_inputs': False, 'stage2.norm_affine': True, 'stage2.normalization': 'none'}
  return needed | {'stage2.coefficients': 'constant'}


def _from_norm(name: str, params: Params) -> dict[str, np.ndarray]:
  return {f'{name}.weight': params['scale'], f'{name}.bias': params['bias']}


def _from_dense(name: str, params: Params) -> dict[str, np.ndarray]:
  return {f'{name}.weight': params['kernel'].T, f'{name}.bias': params['bias']}


def _from_stage(params: Params, stage: nn.Module) -> dict[str, np.ndarray]:
  match stage:
    case HyperBFAttention():
      return _from_attention(params, stage)
    case HyperBFCenters():
      return _from_centers(params, stage)
    case SoftmaxAttention():
      return _from_softmax(params, stage)
    case _:
      return {**_from_dense('mlp.fc1', params['hidden']), **_from_dense('mlp.fc2', params['out'])}


def _from_attention(params: Params, stage: HyperBFAttention) -> dict[str, np.ndarray]:
  qkv = params['qkv']['kernel']
  metric, log_sigma = params.get('metric'), params['log_sigma']
  for what, z in (('metrics', metric), ('sigmas', log_sigma)):
    if z is not None and np.any(z != z[:1]):
      raise UserError(f"the {what} of a layer's heads differ: the authors' attention has one for all of them")
  return {
    'attn.scale': 0.5 * np.exp(-2 * log_sigma[0, 0, 0]),
    'attn.M': _matrix(stage.metric, metric, len(qkv) // stage.heads),
    'attn.qkv.weight': qkv.T,
    **_from_dense('attn.proj', params['out']),
  }


def _from_softmax(params: Params, stage: SoftmaxAttention) -> dict[str, np.ndarray]:
  qkv = params['qkv']['kernel']
  d = len(qkv) // stage.heads
  return {
    'attn.M': np.eye(d),
    'attn.qkv.weight': scaled_queries(qkv, d**0.3).T,
    **_from_dense('attn.proj', params['out']),
  }


def _from_centers(params: Params, stage: HyperBFCenters) -> dict[str, np.ndarray]:
  beta = params['beta'] if stage.kernel == SIGNED else 0.5 * np.exp(-2 * params['log_sigma'])
  return {
    'mlp.centers': params['centers'][0],
    'mlp.M_RBF': _matrix(stage.metric, params.get('metric'), params['centers'].shape[-1]),
    'mlp.beta': np.broadcast_to(beta[0, 0], (stage.centers,)),
    'mlp.fc.weight': (np.exp(params['log_gain'][0]) * params['coefficients'][0]).T,
    'mlp.fc.bias': params['bias'],
  }


def _matrix(metric: str, weights: np.ndarray | None, d: int) -> np.ndarray:
  """Return the matrix M [d, d] of a metric, from its `weights` [H, …], which are equal for all heads.

  If `weights` is None, M is the identity.
  """
  if weights is None:
    return np.eye(d)
  w = weights[0]
  if metric == 'bilinear':
    return w
  return np.diag(w * w) if metric == 'diagonal' else w.T @ w
