"""Tests of the meaning of centers in a model of texts, against the network itself."""

import dataclasses
import functools
import json
import pathlib
import tracemalloc

import jax
import numpy as np
import pytest
from nn.drawn import apply

import hbf
from hbf.analysis import texts
from hbf.analysis.report import text_page
from hbf.analysis.report.explain import about
from hbf.analysis.report.page import render
from hbf.analysis.texts import Place, TextRun
from hbf.analysis.unit_params import silence
from hbf.config.resolve import resolve
from hbf.data.text.texts import Texts
from hbf.data.text.tokenizers import learn_tokenizer
from hbf.editing import places
from hbf.editing.places import LAYERS, Passages, Places, read
from hbf.errors import UserError
from hbf.models.edited import LAST
from hbf.tasks.registry import make_task
from hbf.training.restore import Restored
from hbf.training.sharding import make_mesh

TEXT = b'the quick brown fox jumps over the lazy dog\nand the slow red fox sleeps.\n' * 40


@pytest.fixture(scope='module')
def make():
  """Return a function that makes runs with random parameters: `make(**{'model.tied': False})`."""

  def of(model='hyperbf', **changes):
    config = hbf.get_config('shakespeare', model=model)
    config.update_from_flattened_dict(
      {'model.width': 16, 'model.depth': 2, 'model.heads': 2, 'data.length': 16, **changes}
    )
    config = resolve(config)
    tokenizer = learn_tokenizer('characters', [TEXT], 0)
    tokens = tokenizer.encode(TEXT)
    dataset = Texts('fox', tokenizer, {'train': tokens[:2000], 'test': tokens[2000:]})
    task = make_task(config, dataset)
    network = task.make_model(config.model)
    init = jax.jit(functools.partial(network.init, train=False))
    params = init(jax.random.key(0), np.zeros((1, 16), np.int32))['params']
    keys = iter(jax.random.split(jax.random.key(1), 500))
    params = jax.tree.map(lambda z: z + 0.3 * jax.random.normal(next(keys), z.shape), params)
    return TextRun(pathlib.Path('nowhere'), Restored(config, make_mesh(jax.devices()[:1]), task, 0, network, params))

  return of


@pytest.fixture(scope='module')
def run(make):
  return make()


@pytest.fixture(scope='module')
def windows(run):
  return run.windows('test', 5)


def test_windows_and_their_texts(run, windows):
  assert windows.shape == (5, 17)
  assert run.shown(windows[0].tolist()).replace('⏎', '\n').encode() in TEXT
  place = Place(1, 4)
  shown = texts.context(run, windows, place, before=3)
  assert shown == f'{run.shown(windows[1, 1:4].tolist())}[{run.shown([windows[1, 4]])}]'
  np.testing.assert_allclose(
    run.losses(windows)[0],
    -jax.nn.log_softmax(apply(run.model, run.params, windows[:1, :-1], train=False))[
      0, np.arange(16), windows[0, 1:]
    ],
    rtol=1e-4,
  )


@pytest.mark.parametrize('changes', [{}, {'model.tied': False, 'model.layer_scale': 0.5}])
def test_votes_are_what_the_centers_add_with_the_norm_frozen(make, windows, changes):
  """With a fixed divisor of the norm, all votes, the stage's bias and the stage's input sum to the logit."""
  run = make(**changes)
  seen = run.observe(windows)
  answers = seen.logits.argmax(axis=-1)
  cast = texts.votes(run, seen, answers)
  count = cast.shape[-1]
  bare = run.observe(windows, silence(run.params, 'block1', range(count)))
  through = texts.readout(run, seen.tokens, answers)
  dropped = (through * (seen.tokens - bare.tokens)).sum(axis=-1)
  np.testing.assert_allclose(cast.sum(axis=-1), dropped, rtol=1e-3, atol=1e-4)
  excess = np.take_along_axis(seen.logits, answers[..., None], -1)[..., 0] - seen.logits.mean(axis=-1)
  bias = np.asarray(run.params['norm']['bias'], np.float64) @ texts.writing(run).T
  centered = seen.tokens - seen.tokens.mean(axis=-1, keepdims=True)
  np.testing.assert_allclose((through * centered).sum(axis=-1) + bias[answers], excess, rtol=1e-3, atol=1e-3)
  # Without a center, a token lacks what the center adds for its response.
  responses = seen.responses['block1'][..., 3]
  place = np.unravel_index(np.abs(responses).argmax(), responses.shape)
  added = (seen.tokens - run.observe(windows, silence(run.params, 'block1', [3])).tokens)[place] / responses[place]
  read = (added - added.mean()) * run.params['norm']['scale']
  np.testing.assert_allclose(texts.written(run, 'block1')[3], read @ texts.writing(run).T, rtol=1e-2, atol=1e-2)


def test_the_top_places_have_the_greatest_responses():
  responses = np.zeros((4, 5, 2))
  responses[2, 3, 0], responses[0, 1, 0], responses[3, 0, 1] = 9, 5, 7
  assert texts.top_places(responses, 2)[0] == [Place(2, 3), Place(0, 1)]
  assert texts.top_places(responses, 1)[1] == [Place(3, 0)]


def test_a_silenced_center_changes_the_loss_by_that(run, windows):
  found = texts.loss_without(run, windows, run.losses(windows), 'block0', [1])
  after = run.losses(windows, silence(run.params, 'block0', [1])).mean()
  assert found.mean == pytest.approx(after - run.losses(windows).mean(), abs=1e-6)


def test_the_page_of_a_text_model(run, make):
  count, sections = text_page.explain_text(run)
  made = list(sections)
  assert [section.name for section in made] == list(text_page.TITLES)
  assert count == len(made)
  page = render(about(run), 'by a test', made)
  assert '[x]' in page or '[o]' in page  # a context
  assert not any('lacks' in section.numbers for section in made)
  gpt = [section.numbers.get('lacks', '') for section in text_page.explain_text(make('vit'))[1]]
  assert [bool(lacks) for lacks in gpt] == [False, True, True, True, False]


def test_only_what_is_read_at_places_is_in_memory(run):
  """The model computes arrays for whole windows, but a few places of each window are kept."""
  window = run.windows('train', 1)[0]
  texts_of = [(window[:9], window[9:11]), (window[:4], window[4:5])] * 400
  found = Places.of(texts_of, 16)
  read(run.model, run.params, found)  # compiles
  tracemalloc.start()
  seen = read(run.model, run.params, found)
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert peak < 4 * found.windows.size * seen[LAST].logits.shape[-1]  # bytes of the logits of whole windows
  (one, _), (two, _) = texts_of[:2]
  after_one, after_two = (apply(run.model, run.params, np.array([z]), train=False)[0, -1] for z in (one, two))
  np.testing.assert_allclose(seen[LAST].logits[[0, 2]], [after_one, after_two], rtol=1e-3, atol=1e-4)
  np.testing.assert_array_equal(seen[LAST].points[-3:], seen[LAST].points[:3])


def test_points_of_copies_are_those_that_are_read(run, monkeypatch):
  monkeypatch.setattr(places, 'BEGINNINGS', 3)
  text = run.windows('train', 1)[0].repeat(9)

  def passages():
    return Passages(text, line_break=-1, seed=0, longest=16)

  wanted = places.points_of_copies(run.model, run.params, passages())
  assert {layer: z.shape for layer, z in wanted.items()} == dict.fromkeys(LAYERS, (12, places.PASSAGES, 16))
  monkeypatch.setattr(places, '_read', None)  # it returns the logits of whole windows
  again = places.points_of_copies(run.model, run.params, passages())
  for layer in LAYERS:
    np.testing.assert_array_equal(again[layer], wanted[layer])


def test_the_page_of_the_average_has_the_scores_of_the_average(run, tmp_path):
  scores = {'token_nll': 2.0, 'accuracy': 40.0, 'average': {'token_nll': 1.5, 'accuracy': 50.0}}
  (tmp_path / 'result.json').write_text(json.dumps(scores))
  for average, expected in ((False, 2.0), (True, 1.5)):
    section = next(text_page.explain_text(dataclasses.replace(run, workdir=tmp_path, average=average))[1])
    assert section.numbers['token_nll'] == expected


def test_a_short_test_text_is_refused_before_the_first_section(run):
  dataset = run.task.dataset
  short = dataclasses.replace(dataset, splits={**dataset.splits, 'test': dataset.splits['test'][:16]})
  task = dataclasses.replace(run.task, dataset=short)
  cut = dataclasses.replace(run, restored=dataclasses.replace(run.restored, task=task))
  with pytest.raises(UserError, match='split test: a text of 16 tokens is shorter than a window of 16'):
    text_page.explain_text(cut)


def test_a_run_on_images_is_refused(finished_images):
  with pytest.raises(UserError, match='holds a run of task classification: give a run of task next_token'):
    TextRun.of(finished_images)


@pytest.fixture
def finished_images(tmp_path, toy):
  (tmp_path / 'config.json').write_text(toy().to_json())
  return tmp_path
