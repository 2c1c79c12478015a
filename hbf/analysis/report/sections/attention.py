"""Section on the attention heads."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hbf.analysis.heads import heads, maps, patch_distances, token_differences
from hbf.analysis.report.drawing import colored, enlarged, framed, in_rows, panel, png, rgb
from hbf.analysis.report.page import Drawing, Gallery, MissingPart, PageTable, Paragraph, Section
from hbf.analysis.trained_run import TrainedRun

IMAGES = 100  # images for the mean values
SHOWN = 3  # images with maps
SIDE = 64  # side of a map in pixels


def section(run: TrainedRun) -> Section:
  """Return the section: distances over which heads attend, attention maps, and differences between tokens.

  Raises:
    MissingPart: stage 1 of the model is not softmax or HyperBF attention.
  """
  images = run.read('test', IMAGES).images
  found = heads(run, images)
  if not found:
    raise MissingPart('Stage 1 of this model is not softmax or HyperBF attention, so it has no attention weights.')
  depth = token_differences(run, images)
  numbers: dict[str, Any] = {
    block: {'distance': h.distance.tolist(), 'tokens': h.tokens.tolist()} for block, h in found.items()
  }
  even = float(patch_distances(run).mean())
  numbers |= {'distance_of_even_weights': even, 'tokens_differ': depth.tolist()}
  rows = [(block, _sorted_list(h.distance), _sorted_list(h.tokens)) for block, h in found.items()]
  header = (
    'block',
    'mean distance of attended patches, a number for each head',
    'effective number of attended tokens',
  )
  count = run.grid[0] * run.grid[1] + run.first_patch
  parts: list[Any] = [
    PageTable(
      header,
      rows,
      'The numbers in each cell are sorted from low to high. Distances are in patches. '
      f'Uniform weights would give {even:.1f} patches and {count} tokens.',
    ),
    _depth_drawing(depth),
    *_maps(run, images[:: max(1, len(images) // SHOWN)][:SHOWN]),
    Paragraph('The colors of a map run from 0 (dark) to its largest weight (light).'),
  ]
  command = 'hbf.analysis.heads.heads(run, images); hbf.analysis.heads.maps(run, images, token)'
  return Section('attention', 'Attention', parts, numbers, command)


def _sorted_list(values: np.ndarray) -> str:
  return ', '.join(f'{value:.1f}' for value in np.sort(values))


def _depth_drawing(depth: np.ndarray) -> Drawing:
  figure, axis = panel()
  axis.plot(np.arange(len(depth)), depth, marker='o')
  axis.set(xlabel='after block', ylabel='‖X − 1x̄ᵀ‖ / ‖X‖', ylim=(0, 1), xticks=range(len(depth)))
  axis.set_xticklabels(['tokens', *(str(i) for i in range(len(depth) - 1))])
  return Drawing(
    [figure],
    'Difference of the tokens X of an image, where x̄ is their mean. It is 0 if all tokens are the same. Attention '
    'alone, without residual connections, would bring it to 0 with depth.',
  )


def _maps(run: TrainedRun, images: np.ndarray) -> list[Gallery]:
  """Return a gallery for each image: the attention maps of the query patch in the middle of the image."""
  rows, columns = run.grid
  middle = rows // 2 * columns + columns // 2
  found = maps(run, images, run.first_patch + middle)
  return [_map(run, image, {block: w[i] for block, w in found.items()}) for i, image in enumerate(images)]


def _map(run: TrainedRun, image: np.ndarray, found: Mapping[str, np.ndarray]) -> Gallery:
  """Return a gallery: an image, then the maps of all heads, block by block.

  Args:
    run: the run.
    image: uint8 [height, width, channels].
    found: the attention weights of the query patch by block, [heads, rows, columns].
  """
  rows, columns = run.grid
  times = max(1, SIDE // rows)
  large = enlarged(rgb(image), max(1, SIDE // image.shape[0]))
  side = large.shape[0] // rows
  marked = framed(large, rows // 2 * side, columns // 2 * side, side, 2)
  images = [(png(marked), 'query patch')]
  for block, weights in found.items():
    sheets = np.stack([enlarged(colored(head, 0, head.max()), times) for head in weights])
    images.append((png(in_rows(sheets, min(len(sheets), 4), gap=3)), block))
  return Gallery(images, 'Attention weights of the framed patch, a map for each head.', 190)
