"""Tests of the page of a run: it is complete and self-contained, and a browser shows it correctly."""

import base64
import io
import itertools
import json
import pathlib
import re
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
from PIL import Image
from toy_runs import ONE, QUIET

from hbf.analysis.image_run import LabeledImages
from hbf.analysis.interventions import Effect, Mean
from hbf.analysis.ood_images import load_ood_images
from hbf.analysis.report import prediction_page
from hbf.analysis.report.explain import TITLES, about, explain, numbers
from hbf.analysis.report.page import Columns, Details, Gallery, MissingPart, PageTable, Paragraph, Section, render
from hbf.analysis.report.prediction_page import write_page
from hbf.analysis.report.sections import centers, corrupted, interventions, outliers, summary, voters
from hbf.analysis.report.sections.predictions import check_count
from hbf.analysis.trained_run import TrainedRun
from hbf.errors import UserError
from hbf.evaluation.scores import ACCURACY, LOSS
from hbf.training.loop import train
from hbf.training.predict import read_image
from hbf.training.writers import read_metrics
from tests.browser import CHROMIUM, title_of


@pytest.fixture(scope='module')
def few():
  """Make the sections use few images."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(corrupted, 'IMAGES', 2)
    patch.setattr(corrupted, 'FEWEST', 20)
    patch.setattr(outliers, 'IMAGES', 60)
    patch.setattr(centers, 'TRAINING', 100)
    patch.setattr(interventions, 'IMAGES', 60)
    yield


@pytest.fixture(scope='module')
def page(finished, few):
  """Return a run, its sections and the page."""
  run = TrainedRun.of(finished[0])
  _, sections = explain(run, None, [])
  made = list(sections)
  return run, made, render(about(run), 'by a test', made)


def test_every_section_is_there_with_its_numbers(page, finished):
  run, made, _ = page
  assert [section.name for section in made] == list(TITLES)
  found = json.loads(json.dumps(numbers(made)))
  assert not [section.name for section in made if 'lacks' in section.numbers]
  result = finished[2]
  assert found['run']['correct'] == result['correct'] == round(found['errors']['accuracy'] * result['n'] / 100)
  assert found['errors']['ece'] == pytest.approx(result['ece'], abs=1e-3)
  assert np.trace(found['errors']['confusion']) == result['correct']
  assert found['centers']['block0']['centers'] == run.params['block0']['stage2']['centers'].shape[1]
  assert {'purity', 'purity_of_random_tokens', 'purity_untrained'} < set(found['centers']['block0'])
  assert found['relevance']['votes'][0][0]['lost'] != found['relevance']['votes'][0][0]['adds']
  low, high = found['run']['interval']
  assert low < result['accuracy'] < high
  trained = found['unit']['block0']['stage1']['in_training']
  assert len(trained) == len(found['unit']['epochs']) == 6
  assert trained[-1] == pytest.approx(np.mean(found['unit']['block0']['stage1']['sigma']), rel=1e-5)


def test_a_link_from_every_voter_leads_to_its_center(page):
  _, made, html = page
  found = next(section for section in made if section.name == 'voters').numbers
  links = re.findall(r'href="#(details\d+)">(\d+)<', html)
  centers = dict(re.findall(r'<details id="(details\d+)"><summary>Center (\d+)<', html))
  assert len(links) == sum(map(len, found['votes'])) and dict(links) == centers
  assert [*centers.values()] == [*found['silenced']]
  run = page[0]
  wrong = sum(run.test_logits[i].argmax() != run.test.labels[i] for i in found['images'])
  assert wrong > 0 and f'Of these {len(found["images"])} images, {wrong} ha' in html


def test_half_of_the_shown_images_are_wrong():
  right = np.arange(40) % 4 > 0
  shown = voters.half_wrong(right, 12)
  assert len(set(shown)) == 12 and right[shown].sum() == 6
  assert voters.half_wrong(np.ones(40, bool), 12).tolist() == [0, 6, 13, 20, 26, 33]  # of a split sorted by class


def test_the_page_has_no_path_of_the_machine(page, finished, monkeypatch):
  run, made, html = page
  assert str(finished[0].parent) not in html + json.dumps(numbers(made))
  assert made[0].command == f'hbf eval --workdir={finished[0].name}'
  monkeypatch.chdir(finished[0].parent.parent)
  inside = f'{finished[0].parent.name}/{finished[0].name}'
  assert summary.section(run).command == f'hbf eval --workdir={inside}'


def test_the_example_page_has_no_path_of_the_machine():
  html = (pathlib.Path(__file__).parents[2] / 'docs' / 'explain-example.html').read_text()
  text = re.sub(r'"data:[^"]*"|<[^>]*>', ' ', html)
  assert 'hbf eval --workdir=runs/claim-cifar10-positional' in text
  assert re.findall(r'(?<![\w.<])[~.]?/\w+/\S*', text) == []


def test_the_average_is_explained_by_its_own_figures(finished):
  run = TrainedRun.of(finished[0], average=True)
  found, expected = summary.section(run).numbers, finished[2]['average']
  assert (found['evaluated'], found['correct'], found['accuracy']) == (
    'average',
    expected['correct'],
    expected['accuracy'],
  )
  assert found['correct'] == (run.test_logits.argmax(1) == run.test.labels).sum()
  assert about(run).endswith(', average')


def test_the_page_is_whole_by_itself(page):
  _, _, html = page
  addresses = re.findall(r'(?:src|href)="([^"]*)"', html)
  outside = [address for address in addresses if not address.startswith(('data:', '#'))]
  assert (
    outside == []
    and 'fetch(' not in html
    and 'import(' not in html
    and '@import' not in html
    and 'url(http' not in html
  )
  pictures = [address for address in addresses if address.startswith('data:image/png')]
  assert len(pictures) > 30
  for address in pictures:
    assert Image.open(io.BytesIO(base64.b64decode(address.partition(',')[2]))).size[0] > 0
  assert html.count('<svg') == html.count('</svg>') >= 7
  for name in TITLES:
    assert f'id="{name}"' in html and f'href="#{name}"' in html


def test_the_page_can_be_read_aloud(page):
  """Every picture has a text, no two elements have the same id, and tables have headers. axe-core checks the rest."""
  html = page[2]
  pictures = re.findall(r'<img [^>]*>', html) + re.findall(r'<svg [^>]*>', html)
  assert [picture for picture in pictures if not re.search(r'(?:alt|aria-label)="[^"]+"', picture)] == []
  ids = re.findall(r'\bid="([^"]*)"', html)
  assert len(ids) == len(set(ids)) > 50
  tables = re.findall(r'<table>.*?</table>', html, re.DOTALL)
  assert len(tables) > 5 and all('<th scope=' in table for table in tables)


def test_a_model_that_lacks_a_part_says_so(toy, tmp_path, few):
  train(toy('model=mixer', **{'train.epochs': 0.1, 'log.units': True}), tmp_path / 'mixer', QUIET, ONE)
  run = TrainedRun.of(tmp_path / 'mixer')
  count, sections = explain(run, None, [])
  made = {section.name: section for section in sections}
  assert len(made) == count
  assert all('sigmas' not in line and line['split'] != 'units' for line in read_metrics(run.workdir))
  assert [name for name, section in made.items() if 'lacks' in section.numbers] == [
    'unit',
    'centers',
    'attention',
    'voters',
  ]
  assert 'no centers' in made['centers'].numbers['lacks']


def test_two_runs_stand_beside_each_other(finished, page):
  run = TrainedRun.of(finished[0])
  count, sections = explain(run, run, [])
  assert count == len(TITLES) + 1
  made = list(itertools.islice(sections, 3))
  assert made[0].numbers['agree'] == 100 and made[0].numbers['cka'][1][1] == pytest.approx(1)
  assert made[0].numbers['matched']['block0']['correlation'] == pytest.approx(1)
  assert made[2].numbers['first'] == made[2].numbers['other'] == page[1][1].numbers
  assert 'class="beside"' in render('two', '', made)


def test_numbers_that_json_lacks_are_null():
  """A single image has no interval. Strict readers of JSON refuse a file with Infinity or NaN in it."""
  silenced = [{'loss': {'mean': 1.0, 'half': np.inf}}]
  found = numbers([Section('interventions', 'Title', [], {'silenced': silenced})])
  assert found['interventions'] == {'silenced': [{'loss': {'mean': 1.0, 'half': None}}]}
  json.dumps(found, allow_nan=False)


def test_other_images_are_brought_to_the_runs_shape(finished, tmp_path):
  run = TrainedRun.of(finished[0])
  for i in range(3):
    Image.new('RGB', (30 + i, 20), (255, 0, 0)).save(tmp_path / f'{i}.png')
  found = load_ood_images(run, [str(tmp_path)])
  assert list(found) == ['noise', tmp_path.name]
  assert found[tmp_path.name].shape == (3, *run.task.shape) and found['noise'].shape[1:] == run.task.shape
  red = np.asarray(Image.new('RGB', (1, 1), (255, 0, 0)).convert('L'))[0, 0]
  assert (found[tmp_path.name] == red).all()
  assert load_ood_images(run, ['digits'])['digits'].shape[1:] == run.task.shape
  with pytest.raises(UserError, match='birds'):
    load_ood_images(run, ['birds'])


def test_other_images_are_oblong_like_those_of_the_run(digits_dir, tmp_path):
  config = types.SimpleNamespace(data=types.SimpleNamespace(dir=str(digits_dir)))
  run = types.SimpleNamespace(
    task=types.SimpleNamespace(shape=(4, 6, 1)), restored=types.SimpleNamespace(config=config), workdir='runs/oblong'
  )
  for i in range(2):
    Image.new('L', (6, 4), i).save(tmp_path / f'{i}.png')
  assert load_ood_images(run, [str(tmp_path)])[tmp_path.name].shape == (2, 4, 6, 1)
  with pytest.raises(UserError, match='digits has images of 8×8 pixels: expected 6×4, as in runs/oblong'):
    load_ood_images(run, ['digits'])
  (tmp_path / '1.png').unlink()
  with pytest.raises(UserError, match=f'{tmp_path} has 1 images to score: give two or more'):
    load_ood_images(run, [str(tmp_path)])
  Image.new('L', (4, 6)).save(tmp_path / '1.png')
  with pytest.raises(UserError, match=r'1\.png has 4×6 pixels: expected 6×4'):
    load_ood_images(run, [str(tmp_path)])


def test_a_single_test_image_has_no_auroc():
  one = types.SimpleNamespace(read=lambda split, most: LabeledImages(np.zeros((1, 8, 8, 1), np.uint8), np.zeros(1)))
  with pytest.raises(MissingPart, match='There is a single test image'):
    outliers.section(one, {})


def test_a_single_image_has_no_interval_under_corruptions():
  one = LabeledImages(np.full((1, 8, 8, 1), 128, np.uint8), np.zeros(1))
  run = types.SimpleNamespace(
    task=types.SimpleNamespace(shape=(8, 8, 1)), read=lambda *_: one, logits=lambda images: np.eye(2)[:1]
  )
  found = corrupted.section(run)
  assert found.parts[0].text.startswith(
    'The mean error over all corruptions and strengths is 0.00%, on 1 test image.'
  )
  assert numbers([found])['corrupted']['interval'] == [None, None]


def test_the_measure_of_the_greatest_response_is_that_of_the_kernel():
  scores = np.arange(9.0)
  for kernel, measure in (('gaussian', 'log K'), ('ball_silu', 'depth b − s')):
    drawing = outliers._histogram(scores, {'noise': scores}, kernel)
    assert f'the largest {measure} over' in drawing.caption
    assert drawing.figures[0].axes[0].get_xlabel() == f'greatest {measure}'


@pytest.mark.parametrize('held_out', [False, True])
def test_the_caption_of_the_curves_names_validation_if_there_is_one(tmp_path, held_out):
  splits = ['train', 'train', *(['validation'] if held_out else [])]
  line = {'step': 1, 'epoch': 1.0, LOSS.name: 0.5, ACCURACY.name: 50.0}
  (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(line | {'split': split}) + '\n' for split in splits))
  caption = summary._curves(types.SimpleNamespace(workdir=tmp_path)).caption
  assert ('validation' in caption) == held_out and 'held-out' not in caption


def test_the_control_of_random_parameters_keeps_its_key_in_the_file():
  effect = Effect(*[Mean(1.0, 0.5)] * 3)
  (row,) = interventions._table_of_controls({'the network before training': effect}).rows
  assert row[0] == 'the network with random parameters'  # a run with init_from began with other parameters


def test_a_page_of_too_many_images_is_refused_before_they_are_answered():
  with pytest.raises(UserError, match='1 to 100 images, but 101 were given: split them'):
    check_count(101)


def test_images_of_ones_own_have_a_page(finished, tmp_path, few):
  paths = [str(tmp_path / f'{i}.png') for i in range(3)]
  for i, path in enumerate(paths):
    Image.fromarray(np.full((20 + i, 20), 40 * i, np.uint8)).save(path)
  write_page(finished[0], 'latest', False, paths, str(tmp_path / 'new' / 'page.html'))
  html = (tmp_path / 'new' / 'page.html').read_text()
  run = TrainedRun.of(finished[0])
  image = np.asarray(read_image(paths[2], run.task.shape))
  likeliest = run.classes[run.logits(image[None])[0].argmax()]
  assert f'<th scope="row">{likeliest}</th>' in html[html.index('id="image2"') :]
  assert [path for path in paths if path not in html] == [] and html.count('logit lost without it') == 3
  with pytest.raises(UserError, match='1 to 100 images, but 0 were given'):
    write_page(finished[0], 'latest', False, [], str(tmp_path / 'page.html'), dir=str(tmp_path / 'moved'))
  assert not (tmp_path / 'page.html').exists()
  assert (tmp_path / 'moved' / 'digits').is_dir()  # data are read where the caller says


def test_a_page_that_cannot_be_written_is_named_in_one_line(tmp_path, monkeypatch):
  (tmp_path / 'taken').write_text('mine')
  opened = types.SimpleNamespace(workdir=tmp_path)
  monkeypatch.setattr(prediction_page, 'TrainedRun', types.SimpleNamespace(of=lambda *_, **__: opened))
  monkeypatch.setattr(prediction_page, 'sections', lambda run, images: [])
  monkeypatch.setattr(prediction_page, 'about', lambda run: 'a run')
  with pytest.raises(UserError, match='html could not be written'):
    write_page(tmp_path, 'latest', False, [], str(tmp_path / 'taken' / 'page.html'))


def test_parts_are_written_as_text():
  parts = [
    Paragraph('a < b'),
    PageTable(('x',), [('<b>',)]),
    Details('more', [Paragraph('&')]),
    Columns([('one', [Gallery([], '')])]),
  ]
  html = render('<title>', '', [Section('s', 'S', parts)])
  assert 'a &lt; b' in html and '<td>&lt;b&gt;</td>' in html and '<summary>more</summary>' in html
  assert '<title>&lt;title&gt;</title>' in html


@pytest.mark.parametrize(
  ('flags', 'said'),
  [
    pytest.param(['--workdir=nowhere'], 'nowhere', marks=pytest.mark.slow),
    (['--workdir={run}', '--average', '--ood=birds'], 'birds'),
  ],
)
def test_what_cannot_be_is_a_line(finished, tmp_path, flags, said):
  run = tmp_path / 'run'
  shutil.copytree(finished[0], run)
  (run / 'edits.npz').touch()
  command = [sys.executable, '-m', 'hbf', 'explain', *(flag.format(run=run) for flag in flags)]
  done = subprocess.run(command, capture_output=True, text=True)
  *warnings, error = done.stderr.splitlines()
  assert done.returncode == 1 and error.startswith('error: ') and said in error
  left_out = f'warning: {run} has edits, which are left out: `hbf eval --edits` measures them'
  assert warnings == ([] if said == 'nowhere' else [left_out])
  assert not (run / 'explain.html').exists()


@pytest.mark.skipif(CHROMIUM is None, reason='no Chromium is installed')
@pytest.mark.parametrize('width', [400, 1400])
def test_a_browser_shows_all_of_it(page, tmp_path, width):
  """Every picture has pixels, nothing is loaded, and the page is not wider than the screen."""
  probe = """
    window.onerror = said => document.title = 'error ' + said
    window.onload = () => {
      const shown = [...document.images].filter(image => image.naturalWidth > 0).length
      const wide = [...document.querySelectorAll('svg')].filter(svg => svg.getBoundingClientRect().width > 20).length
      document.title = JSON.stringify({shown, images: document.images.length, wide,
        drawings: document.querySelectorAll('svg').length, requests: performance.getEntriesByType('resource').length,
        over: document.documentElement.scrollWidth - window.innerWidth})
    }"""
  found = json.loads(title_of(page[2], probe, tmp_path, width))
  assert found['shown'] == found['images'] > 30
  assert found['wide'] == found['drawings'] >= 7
  assert found['requests'] == 0
  assert found['over'] <= 0


@pytest.mark.skipif(CHROMIUM is None, reason='no Chromium is installed')
def test_tables_can_be_sorted_and_filtered(tmp_path):
  """Numbers may have signs and separators. A second click turns the order. The filter hides the other rows."""
  rows = [('a', '1,200'), ('b', '−3.5 ± 1'), ('c', '+20'), ('d', '7'), ('e', '0')]
  html = render('t', '', [Section('s', 'S', [PageTable(('name', 'size'), rows, ''), PageTable(('x',), rows[:2])])])
  probe = """
    window.onload = () => {
      const shown = () => [...document.querySelectorAll('tbody')[0].rows].filter(row => !row.hidden)
        .map(row => row.cells[0].textContent).join('')
      const [name, size] = document.querySelectorAll('button'), found = [document.querySelectorAll('button').length]
      size.click(); found.push(shown()); size.click(); found.push(shown()); found.push(size.parentNode.ariaSort)
      const input = document.querySelector('input')
      input.value = '20'; input.dispatchEvent(new Event('input')); found.push(shown())
      document.title = JSON.stringify(found)
    }"""
  assert json.loads(title_of(html, probe, tmp_path, 800)) == [2, 'acdeb', 'bedca', 'ascending', 'ca']
