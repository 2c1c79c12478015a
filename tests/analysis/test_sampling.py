"""Tests that the sections and studies take evenly spaced images, because splits may be sorted by class."""

import numpy as np
import pytest

from hbf.analysis import interventions, outlier_study, outlier_tokens
from hbf.analysis.centers import census
from hbf.analysis.image_run import LabeledImages
from hbf.analysis.ood_images import NOISE
from hbf.analysis.outlier_study import SCRAMBLED
from hbf.analysis.report.sections import pair, relevance, unit, voters
from hbf.data.pipeline.order import evenly_spaced


class Stop(Exception):
  """Ends a section after it has chosen its images."""


@pytest.fixture
def taken(monkeypatch):
  """Return a function that replaces a function, so that its argument at a position is kept and the section ends."""

  def replace(module, name, position):
    kept = []

    def keep(*arguments):
      kept.append(arguments[position])
      raise Stop

    monkeypatch.setattr(module, name, keep)
    return kept

  return replace


def test_sections_take_images_of_the_whole_split(run, images, taken, monkeypatch):
  found = census(run, images)
  training = LabeledImages(images, run.test.labels[:16])
  kept = taken(interventions, 'last_units', 1)
  with pytest.raises(Stop):
    voters.section(run, training, found)
  count = len(run.test.labels)
  monkeypatch.setattr(voters, 'TESTED', 5)
  with pytest.raises(Stop):
    voters.section(run, training, found)
  np.testing.assert_array_equal(kept[1], run.test.images[evenly_spaced(count, 5)])

  kept = taken(unit, 'summarize_sigmas', 1)
  with pytest.raises(Stop):
    unit.section(run)
  np.testing.assert_array_equal(kept[0], run.test.images[evenly_spaced(count, unit.IMAGES)])

  monkeypatch.setattr(relevance, 'IMAGES', 12)
  kept = taken(relevance, 'strongest', 1)
  with pytest.raises(Stop):
    relevance.section(run, training, found)
  np.testing.assert_array_equal(kept[0], run.test.images[evenly_spaced(count, 12)[::2]])

  monkeypatch.setattr(pair, 'RESPONDED', 5)
  kept = taken(pair, '_matches', 2)
  with pytest.raises(Stop):
    pair.section(run, run)
  np.testing.assert_array_equal(kept[0], run.test.images[evenly_spaced(count, 5)])


def test_the_tokens_of_a_study_are_of_images_of_the_whole_split(made, taken, monkeypatch):
  run = made(**{'data.validation': 0.1})
  monkeypatch.setattr(outlier_tokens, 'IMAGES', 40)
  kept = taken(outlier_tokens, 'fit', 1)
  with pytest.raises(Stop):
    outlier_study.learn(run)
  images, _ = run.read('train', outlier_study.TRAINING)
  np.testing.assert_array_equal(kept[0], images[evenly_spaced(len(images), 40)])


@pytest.mark.parametrize('most', [40, 250, 10_000])
def test_textures_come_from_images_that_are_not_scored(run, most, monkeypatch):
  monkeypatch.setattr(outlier_study, 'MOST', most)
  monkeypatch.setattr(outlier_study, 'scrambled', lambda images, seed: images)
  found = outlier_study.load_outside(run, [])
  if most > len(run.test.labels):
    assert [*found] == [NOISE]
    return
  scored = {image.tobytes() for image in run.read('test', most).images}
  others = [image.tobytes() for image in found[SCRAMBLED]]
  assert len(others) == min(most, len(run.test.labels) - most) and scored.isdisjoint(others)
