"""Weights of timm (github.com/huggingface/pytorch-image-models): state_dicts of its ViT, gMLP and MLP-Mixer.

The source files are timm/models/vision_transformer.py, mlp_mixer.py and layers/mlp.py of version 1.0.31. A ViT must
have the form of Dosovitskiy et al., as DeiT has: a class token, learned positions, a bias of queries, keys and
values, and one norm before the head. timm's pretrained_cfg of a network has the mean and std of the network's images.
"""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

from hbf.errors import UserError
from hbf.interop.network import Network, mixer_config, model_config, read_file, read_fixed, to_module, vit_config
from hbf.interop.positions import resize, square_side
from hbf.interop.pytorch import NORM_AND_HEAD, VIT, linear, norm, patches
from hbf.interop.table import Params, Table, Tensors
from hbf.models.classifier import ImageClassifier

# The number of heads does not follow from the tensors. Heads of timm's ViTs have 64 dimensions, except in the largest
# ViTs: so400m, huge, giant and gigantic.
_HEAD_WIDTH, _HEADS = 64, {1152: 16, 1280: 16, 1408: 16, 1664: 16}
_GATE_EPSILON = 1e-5  # PyTorch's default. The other norms have 1e-6


def load(path: str | pathlib.Path, heads: int | None = None) -> tuple[ImageClassifier, dict[str, Params]]:
  """Load a network of timm as a Flax module.

  Args:
    path: a .safetensors, .npz or .pth file of the state_dict. Nothing in the file is run.
    heads: number of heads of a ViT. None: the number in timm's own ViT of this width.

  Returns:
    module and variables: `module.apply(variables, images, train=False)` returns logits [batch, classes]. Images are
    float32 [batch, height, width, 3], normalized like the training images of the network. A ViT takes images of any
    size that its patches divide, see `hbf.interop.positions.resize`.

  Raises:
    UserError: the file cannot be read, or has another kind of network. The message lists the tensors that do not fit.
  """
  return to_module(read_file(pathlib.Path(path), functools.partial(read, heads=heads)))


def read(tensors: Tensors, heads: int | None = None) -> Network:
  """Return the ViT, gMLP or Mixer that has these tensors. `heads` and the errors are as in `load`."""
  if any('.mlp_tokens.' in name for name in tensors):
    return read_fixed(_MIXER, tensors, functools.partial(mixer_config, activation='gelu_erf'))
  if any('.mlp_channels.' in name for name in tensors):
    return read_fixed(_GMLP, tensors, _gmlp_config)
  return _read_vit(tensors, heads)


def _read_vit(tensors: Tensors, heads: int | None) -> Network:
  sizes, params = _VIT.read(tensors)
  width = sizes['D']
  heads = heads if heads is not None else _HEADS.get(width, max(1, width // _HEAD_WIDTH))
  if heads < 1 or width % heads:
    raise UserError(f'its width of {width} is not divisible by {heads} heads')
  return Network(
    origin=_VIT.origin,
    config=vit_config(sizes, heads, 'gelu_erf'),
    params=params,
    channels=sizes['channels'],
    classes=sizes['classes'],
    patches=square_side(sizes['N'] - 1) ** 2,
    resize=resize,
  )


def _gmlp_config(sizes: Mapping[str, int]) -> dict[str, Any]:
  stage1 = {'hidden': sizes['hidden'], 'activation': 'gelu_erf', 'norm_epsilon': _GATE_EPSILON}
  return model_config('gmlp', sizes, stage1, {})


_VIT = Table(
  origin="timm's ViT",
  network=VIT,
  block={
    **norm('norm_stage1', 'norm1'),
    **linear('stage1/qkv', 'attn.qkv', 'D', '3D'),
    **linear('stage1/out', 'attn.proj', 'D', 'D'),
    **norm('norm_stage2', 'norm2'),
    **linear('stage2/hidden', 'mlp.fc1', 'D', 'hidden'),
    **linear('stage2/out', 'mlp.fc2', 'hidden', 'D'),
  },
  prefix='blocks.{}.',
)
_GMLP = Table(
  origin="timm's gMLP",
  network={**patches('stem.proj'), **NORM_AND_HEAD},
  block={
    **norm('norm_stage1', 'norm'),
    **linear('stage1/in', 'mlp_channels.fc1', 'D', '2hidden'),
    **norm('stage1/norm', 'mlp_channels.gate.norm', 'hidden'),
    **linear('stage1/spatial', 'mlp_channels.gate.proj', 'N', 'N'),
    **linear('stage1/out', 'mlp_channels.fc2', 'hidden', 'D'),
  },
  prefix='blocks.{}.',
)
_MIXER = Table(
  origin="timm's Mixer",
  network={**patches('stem.proj'), **NORM_AND_HEAD},
  block={
    **norm('norm_stage1', 'norm1'),
    **linear('stage1/hidden', 'mlp_tokens.fc1', 'N', 'tokens'),
    **linear('stage1/out', 'mlp_tokens.fc2', 'tokens', 'N'),
    **norm('norm_stage2', 'norm2'),
    **linear('stage2/hidden', 'mlp_channels.fc1', 'D', 'hidden'),
    **linear('stage2/out', 'mlp_channels.fc2', 'hidden', 'D'),
  },
  prefix='blocks.{}.',
)
