"""Tests of pictures of learning curves: every line has a label, and nothing overlaps or leaves the picture."""

import itertools
import json
import pathlib

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from sampled import sampled

from hbf.comparison.curves import COLORS, REST, _curve, draw_curves, spread_labels
from hbf.comparison.grid import Arm, Grid
from hbf.errors import UserError
from hbf.evaluation.scores import LOSS

LONG = 'a-rather-long-name-of-an-arm'


@pytest.fixture
def drawn(tmp_path, monkeypatch):
  """Return a function that draws arms whose validation accuracy ends at given values. It returns the saved figure."""
  scores = []
  save = Figure.savefig
  monkeypatch.setattr(Figure, 'savefig', lambda self, *args, **kw: (scores.append(self), save(self, *args, **kw)))
  monkeypatch.setattr(plt, 'close', lambda score: None)

  def draw(ends, seeds=(0, 1)):
    grid = Grid(tuple(Arm('cifar10', f'{LONG}-{i}', ()) for i in range(len(ends))), seeds)
    for arm, end in zip(grid.arms, ends, strict=True):
      for seed in seeds:
        (tmp_path / arm.run_name(seed)).mkdir()
        lines = [
          {
            'step': e,
            'epoch': e,
            'split': split,
            'loss': 2.5 - e * end / 50 + seed / 20,
            'accuracy': e * end / 2 + seed,
          }
          for e in (1, 2)
          for split in ('train', 'validation')
        ]
        text = ''.join(json.dumps(line) + '\n' for line in lines)
        (tmp_path / arm.run_name(seed) / 'metrics.jsonl').write_text(text)
    draw_curves(grid, tmp_path, tmp_path / 'curves.png')
    return scores[0]

  yield draw
  plt.close('all')


def boxes(score):
  """Return the bounding box of every text in a figure, in a dict for each panel."""
  score.draw_without_rendering()
  renderer = score.canvas.get_renderer()
  panels = []
  for axis in score.axes:
    texts = [*axis.texts, axis.title, axis.xaxis.label, axis.yaxis.label]
    texts += axis.get_legend().get_texts() if axis.get_legend() else []
    # Of an annotation without its arrow.
    panels.append({text.get_text(): Text.get_window_extent(text, renderer) for text in texts if text.get_text()})
  return panels


@pytest.mark.parametrize('ends', [(50.0, 52.0), (50.0, *(50 + 0.1 * i for i in range(16)))])
def test_every_line_is_named_in_the_picture_and_no_name_covers_another(drawn, ends):
  score = drawn(ends)
  for panel in boxes(score):
    assert sum(name.startswith(LONG) for name in panel) == len(ends)
    for box in panel.values():
      assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= score.bbox.x1 and box.y1 <= score.bbox.y1
    for one, other in itertools.combinations(panel.values(), 2):
      assert not one.overlaps(other)


@pytest.mark.parametrize('arms', [1, 3, 1 + len(COLORS), 17])
def test_lines_of_a_color_are_told_apart_and_the_best_have_one(drawn, arms):
  ends = 50 + np.random.default_rng(0).permutation(arms)
  score = drawn(ends)
  colors = [[to_hex(line.get_color()) for line in axis.lines] for axis in score.axes]
  assert colors[0] == colors[1]
  gray = [i for i, color in enumerate(colors[0]) if color == to_hex(REST)]
  colored = [color for i, color in enumerate(colors[0]) if i not in gray]
  assert len(set(colored)) == len(colored) == min(arms, 1 + len(COLORS))
  assert 0 not in gray  # the one that others are compared with
  if gray:
    assert max(ends[gray]) < min(end for i, end in enumerate(ends) if i and i not in gray)


def test_a_comparison_without_a_line_is_drawn_empty(tmp_path):
  draw_curves(Grid((Arm('cifar10', 'vit', ()),), (0,)), tmp_path, tmp_path / 'curves.png')
  assert (tmp_path / 'curves.png').stat().st_size > 0


def test_a_picture_that_can_not_be_written_leaves_the_old_one(tmp_path, monkeypatch):
  def full(self, file, **options):
    file.write(b'cut')
    raise OSError(28, 'No space left on device')

  (tmp_path / 'curves.png').write_bytes(b'old')
  monkeypatch.setattr(Figure, 'savefig', full)
  with pytest.raises(UserError, match=r'curves\.png could not be written'):
    draw_curves(Grid((Arm('cifar10', 'vit', ()),), (0,)), tmp_path, tmp_path / 'curves.png')
  assert [path.read_bytes() for path in tmp_path.iterdir()] == [b'old']


def test_runs_on_texts_of_which_nothing_is_held_out_show_what_training_reports(tmp_path):
  arm = Arm('shakespeare', 'gpt', (), task='next_token')
  (tmp_path / arm.run_name(0)).mkdir()
  lines = [{'step': e, 'epoch': e, 'split': 'train', 'loss': 2.5 - e, 'accuracy': 40.0 + e} for e in (1, 2)]
  lines += [{'step': 2, 'epoch': 2, 'split': 'test', 'token_nll': 1.7}]
  (tmp_path / arm.run_name(0) / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  draw_curves(Grid((arm,), (0,)), tmp_path, tmp_path / 'curves.png')
  assert (tmp_path / 'curves.png').stat().st_size > 0


def test_axes_have_units_and_lines_are_means(drawn):
  left, right = drawn([40.0, 60.0]).axes
  assert [axis.get_ylabel() for axis in (left, right)] == ['training loss, nats', 'validation accuracy, %']
  np.testing.assert_allclose(right.lines[1].get_ydata(), [30.5, 60.5])
  band = right.collections[1].get_paths()[0].vertices[:, 1]
  assert (band.min(), band.max()) == (30.0, 61.0)


def test_seeds_are_averaged_at_equal_epochs(tmp_path, monkeypatch):
  """One seed was evaluated twice as often. Both seeds have the same accuracy at the same epoch."""
  axes = []
  monkeypatch.setattr(plt, 'close', lambda figure: axes.extend(figure.axes))
  grid = Grid((Arm('cifar10', 'vit', ()),), (0, 1))
  for seed, epochs in enumerate(([2, 4, 6, 8], range(1, 9))):
    (tmp_path / f'cifar10-vit-{seed}').mkdir()
    lines = [{'step': e, 'epoch': e, 'split': 'validation', 'loss': 1.0, 'accuracy': 10 * e} for e in epochs]
    (tmp_path / f'cifar10-vit-{seed}' / 'metrics.jsonl').write_text(''.join(json.dumps(z) + '\n' for z in lines))
  draw_curves(grid, tmp_path, tmp_path / 'curves.png')
  (line,) = axes[1].lines
  np.testing.assert_allclose(line.get_xydata(), [(2, 20), (4, 40), (6, 60), (8, 80)])


def test_an_arm_that_diverged_is_drawn_up_to_there(drawn):
  score = drawn([40.0, float('nan'), 60.0])
  for axis in score.axes:
    assert [text.get_text() for text in axis.texts] == [f'{LONG}-0', f'{LONG}-2']


def test_reports_of_skipped_steps_are_left_out():
  run = [{'split': 'train', 'epoch': epoch, 'loss': 1.0 / epoch} for epoch in (1, 2, 3)]
  del run[1]['loss']  # all steps since the last report were skipped
  curve = _curve([run], 'train', LOSS)
  assert curve.epochs.tolist() == [1, 3]


@pytest.mark.parametrize('seed', range(5))
def test_places_are_apart_in_order_within_bounds_and_near(seed):
  random = np.random.default_rng(seed)
  wanted = random.random(12) ** 2
  places = spread_labels(wanted, 0.05, 0.0, 1.0)
  order = np.argsort(wanted)
  assert (np.diff(places[order]) >= 0.05 - 1e-9).all()
  assert places.min() >= 0
  assert places.max() <= 1 + 1e-9
  for _ in range(100):  # no other allowed positions are nearer
    other = np.sort(random.random(12) * (1 - 11 * 0.05)) + 0.05 * np.arange(12)
    near = np.empty(12)
    near[order] = 0.9 * places[order] + 0.1 * other
    assert ((near - wanted) ** 2).sum() >= ((places - wanted) ** 2).sum() - 1e-9


def test_places_that_are_apart_stay():
  np.testing.assert_allclose(spread_labels([0.9, 0.1, 0.5], 0.2, 0.0, 1.0), [0.9, 0.1, 0.5])


PICTURES = sorted((pathlib.Path(__file__).parents[2] / 'results').glob('*/curves.png'))


@pytest.mark.parametrize('committed', sampled(PICTURES), ids=lambda path: path.parent.name)
def test_a_committed_picture_is_that_of_its_logs(committed, tmp_path):
  draw_curves(Grid.load(committed.parent), committed.parent, tmp_path / 'curves.png')
  now, then = plt.imread(tmp_path / 'curves.png'), plt.imread(committed)
  assert now.shape == then.shape, f'{committed}: draw it again'
  assert np.abs(now - then).mean() < 0.005, f'{committed}: draw it again'  # fonts may differ by a shade
