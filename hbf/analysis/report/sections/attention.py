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
  if window := run.model.trunk.window:
    about = Paragraph(f'Stage 1 mixes tokens in windows (model.window={window}), whose weights are not shown.')
    depth = token_differences(run, images)
    command = 'hbf.analysis.heads.token_differences(run, images)'
    return Section(
      'attention', 'Attention', [about, _depth_drawing(depth)], {'tokens_differ': depth.tolist()}, command
    )
  found = heads(run, images)
  if not found:
    raise MissingPart('Stage 1 of this model is not softmax or HyperBF attention, so it has no attention weights.')
  depth = token_differences(run, images)
  even = {block: patch_distances(run, block) for block in found}
  numbers: dict[str, Any] = {
    block: {
      'distance': h.distance.tolist(),
      'tokens': h.tokens.tolist(),
      'distance_of_even_weights': float(even[block].mean()),
    }
    for block, h in found.items()
  }
  numbers['tokens_differ'] = depth.tolist()
  rows = [
    (
      block,
      _sorted_list(h.distance),
      _sorted_list(h.tokens),
      f'{even[block].mean():.1f} patches, {len(even[block]) + run.first_patch} tokens',
    )
    for block, h in found.items()
  ]
  header = (
    'block',
    'mean distance of attended patches, a number for each head',
    'effective number of attended tokens',
    'with uniform weights',
  )
  parts: list[Any] = [
    PageTable(
      header, rows, 'The numbers in each cell are sorted from low to high. Distances are in patches of the block.'
    ),
    _depth_drawing(depth),
    *_maps(run, images[:: max(1, len(images) // SHOWN)][:SHOWN]),
  ]
  command = 'hbf.analysis.heads.heads(run, images); hbf.analysis.heads.maps(run, images)'
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


def _maps(run: TrainedRun, images: np.ndarray) -> list[Gallery | Paragraph]:
  """Return a gallery for each image: the attention maps of the query patch in the middle of the image.

  If all images have the same maps, as in a stage 1 that compares positions only, there is one gallery.
  """
  found = maps(run, images)
  same = all(np.allclose(w, w[:1]) for w in found.values())
  shown = [
    _map(run, image, {block: w[i] for block, w in found.items()})
    for i, image in enumerate(images[:1] if same else images)
  ]
  about = 'The colors of a map run from 0 (dark) to its largest weight (light).'
  return [*shown, Paragraph(about + ' All images have the same maps.' * same)]


def _map(run: TrainedRun, image: np.ndarray, found: Mapping[str, np.ndarray]) -> Gallery:
  """Return a gallery: an image, then the maps of all heads, block by block.

  If blocks have several resolutions, the image comes again before the first block of each.

  Args:
    run: the run.
    image: uint8 [height, width, channels].
    found: the attention weights of the query patch by block, [heads, rows, columns].
  """
  large = enlarged(rgb(image), max(1, SIDE // image.shape[0]))
  images, before = [], None
  for block, weights in found.items():
    patches = run.patches_of(block)
    if patches != before:
      side = large.shape[0] // patches.rows
      row, column = divmod(patches.middle, patches.columns)
      images.append((png(framed(large, row * side, column * side, side, 2)), 'query patch'))
    times, before = max(1, SIDE // patches.rows), patches
    sheets = np.stack([enlarged(colored(head, 0, head.max()), times) for head in weights])
    images.append((png(in_rows(sheets, min(len(sheets), 4), gap=3)), block))
  return Gallery(images, 'Attention weights of the framed patch, a map for each head.', 190)
