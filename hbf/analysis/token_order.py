"""Use of token order by stage 1 of a language model: python -m hbf.analysis.token_order --workdir runs/text.

For attention, the script measures the mean distance over which each head attends, and its sigmas. For gMLP, it
measures how near the spatial weights are to a Toeplitz matrix, whose entries depend only on the offset i − j of two
tokens. gMLP may learn any matrix, but comes near to this form (Liu et al. 2021, Figure 3). The script writes
mixing.json, and for gMLP also mixing.png.
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from hbf import markdown
from hbf.analysis.unit_params import block_names
from hbf.analysis.weights import attention_weights
from hbf.arguments import Parser
from hbf.comparison.figures import plt, write_png
from hbf.errors import UserError, in_one_line
from hbf.models.language import LanguageModel
from hbf.training.machine import keep_freed_memory
from hbf.training.restore import restore
from hbf.training.workdir import write_json

WINDOWS = 32  # windows of the test text for the mean distances
# Names in files of earlier versions, and the names that replaced them.
OLD_KEYS = {'width': 'sigma', 'place_width': 'position_sigma', 'place_offset': 'position_offset'}


def distances(model: LanguageModel, params: Any, tokens: jax.Array) -> dict[str, np.ndarray]:
  """Return the mean distance over which each head attends, in tokens.

  The distance for token i is Σ_j w_ij |i − j|, with the attention weights w. The mean is over the tokens i and the
  windows. Only tokens in the second half of a window count, because they have enough earlier tokens to attend to.

  Args:
    model: the network.
    params: its parameters.
    tokens: windows of text, int32 [B, N].

  Returns:
    An array [heads] for each block whose stage 1 has attention weights, by the name of the block.
  """
  length = tokens.shape[1]
  away = np.abs(np.subtract.outer(np.arange(length), np.arange(length)))[length // 2 :]
  weights = attention_weights(model, params, tokens)
  return {
    block: np.asarray((w[:, :, length // 2 :] * away).sum(axis=-1).mean(axis=(0, 2))) for block, w in weights.items()
  }


def spatial(params: Mapping[str, Any], causal: bool) -> dict[str, np.ndarray]:
  """Return the spatial matrix [N, N] of the gate in each gMLP block, by the name of the block.

  Row i has the weights of all tokens in the gate of token i.

  Args:
    params: the parameters of the network.
    causal: True if token i depends only on tokens 0 to i. Then the other entries of row i are NaN.
  """
  matrices = {}
  for block, part in params.items():
    if block.startswith('block') and 'spatial' in part['stage1']:
      matrix = np.asarray(part['stage1']['spatial']['kernel'], np.float64).T
      matrices[block] = np.where(np.tri(len(matrix), dtype=bool), matrix, np.nan) if causal else matrix
  return matrices


def toeplitz_share(matrix: np.ndarray) -> float:
  """Return the share of a matrix's variance that the means of its diagonals explain, from 0 to 1.

  The share is 1 for a Toeplitz matrix, and about n / m for a random matrix with n diagonals and m entries. NaN
  entries do not count.
  """
  known = ~np.isnan(matrix)
  offsets = np.subtract.outer(np.arange(len(matrix)), np.arange(len(matrix)))[known]
  values = matrix[known]
  where = offsets - offsets.min()
  counts = np.maximum(np.bincount(where), 1)
  means = np.bincount(where, weights=values) / counts
  return 1 - float(np.square(values - means[where]).sum() / np.square(values - values.mean()).sum())


def measure(
  workdir: pathlib.Path, checkpoint: str = 'latest', dir: str = '', root: str = ''
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Return statistics of stage 1 by block, in a form for JSON, and the result of `spatial`.

  For attention, the statistics are the `distances`, and the learned sigmas and position offsets. For gMLP, they are
  the `toeplitz_share`.

  Args:
    workdir: folder of a run on texts.
    checkpoint: 'latest', 'best' or a step.
    dir: folder of the prepared TFDS data. If empty, the folder used in training.
    root: file or folder of the text. If empty, the one used in training.

  Raises:
    UserError: the run is not on texts, or an error of `hbf.training.restore.restore`.
  """
  restored = restore(workdir, checkpoint, jax.devices()[:1], dir=dir, root=root)
  model, params = restored.model, restored.params
  if not isinstance(model, LanguageModel):
    raise UserError(f'{workdir} holds a run on images: give a run of task next_token or masked_token')
  task = restored.task
  tokens = np.asarray(task.dataset.splits['test'][: WINDOWS * task.units], np.int32)
  windows = jnp.asarray(tokens[: len(tokens) // task.units * task.units].reshape(-1, task.units))
  matrices = spatial(params, model.causal)
  shares = {block: toeplitz_share(matrix) for block, matrix in matrices.items()}
  far = distances(model, params, windows)
  blocks = {}
  for block in block_names(model):
    stage = params[block]['stage1']
    learned = [name for name in ('log_sigma', 'position_log_sigma') if name in stage]
    sigmas = {name.replace('log_', ''): np.exp(np.asarray(stage[name])).ravel().tolist() for name in learned}
    offset = (
      {'position_offset': np.asarray(stage['position_offset']).ravel().tolist()} if 'position_offset' in stage else {}
    )
    away = {'distance': far[block].tolist()} if block in far else {}
    share = {'toeplitz_share': shares[block]} if block in shares else {}
    blocks[block] = sigmas | offset | away | share
  return {'window': task.units, 'blocks': blocks}, matrices


def table(found: Mapping[str, Any]) -> str:
  """Return a Markdown table of the statistics that `measure` returns, with a row for each block."""
  names = list(dict.fromkeys(name for block in found['blocks'].values() for name in block))
  rows = [(block, *(_shown(about.get(name)) for name in names)) for block, about in found['blocks'].items()]
  labels = (OLD_KEYS.get(name, name).replace('_', ' ') for name in names)
  return markdown.table(('block', *labels), rows)


def _shown(value: Any) -> str:
  if value is None:
    return ''
  return f'{value:.3f}' if isinstance(value, float) else ', '.join(f'{number:.2f}' for number in value)


def draw(matrices: Mapping[str, np.ndarray], path: pathlib.Path) -> None:
  """Write a PNG with a panel for each matrix. Each panel has a color scale of its own, with 0 in the middle."""
  figure, axes = plt.subplots(
    1, len(matrices), figsize=(3.4 * len(matrices), 3.2), squeeze=False, layout='constrained'
  )
  for axis, (block, matrix) in zip(axes[0], matrices.items(), strict=True):
    bound = np.nanmax(np.abs(matrix))
    image = axis.imshow(matrix, cmap='PuOr', vmin=-bound, vmax=bound)
    axis.set(title=f'{block}, Toeplitz {toeplitz_share(matrix):.2f}', xlabel='from token', ylabel='to token')
    figure.colorbar(image, ax=axis, shrink=0.8)
  write_png(figure, path)


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command and return its exit status."""
  parser = Parser('hbf.analysis.token_order', __doc__.split('\n')[0])
  parser.add_run('of a run on texts')
  flags = parser.parse_args(arguments)
  keep_freed_memory()
  logging.set_verbosity(logging.ERROR)  # hides warnings of Orbax about intended behavior
  found, matrices = measure(flags.workdir, flags.checkpoint, dir=flags.data_dir, root=flags.data_root)
  write_json(flags.workdir / 'mixing.json', found)
  if matrices:
    draw(matrices, flags.workdir / 'mixing.png')
  print(f'{flags.workdir}, windows of {found["window"]} tokens:\n\n{table(found)}')
  return 0


if __name__ == '__main__':
  sys.exit(main())
