"""Tests of README.md, docs/ and the notebooks: links have targets, commands exist, and the worked example works."""

import importlib.util
import json
import pathlib
import re
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import hbf
from hbf.__main__ import COMMANDS
from hbf.config.command_line import read_config
from hbf.models.build import build_model, count_parameters
from hbf.models.matching import match_parameters
from hbf.nn import registry
from hbf.training.loop import train

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {path: path.read_text() for path in (ROOT / 'README.md', *sorted(ROOT.glob('docs/**/*.md')))}
# The notebooks' text has links and commands like a page's.
NOTEBOOKS = {
  path: '\n'.join(''.join(c['source']) for c in json.loads(path.read_text())['cells'] if c['cell_type'] == 'markdown')
  for path in sorted(ROOT.glob('examples/*.ipynb'))
}
TEXTS = PAGES | NOTEBOOKS
QUIET = Console(quiet=True)
# Up to the end of the line or of the code span; a line that ends in a backslash goes on.
MODULE, ARGUMENTS = r'(?:hbf|benchmarks|results)[\w.]*', r'(?:\\\n|[^`#\n])*'
COMMAND = re.compile(
  rf'\b(?:(?:python -m )?hbf ({"|".join(COMMANDS)})\b|python (?:-m ({MODULE})|(train|eval)\.py))({ARGUMENTS})'
)


def test_the_readme_is_short():
  assert PAGES[ROOT / 'README.md'].count('\n') <= 120


def test_the_site_has_every_page_and_the_api_every_public_name():
  site, api = (ROOT / 'mkdocs.yml').read_text(), PAGES[ROOT / 'docs' / 'reference' / 'api.md']
  pages = [path.relative_to(ROOT / 'docs').as_posix() for path in PAGES if path != ROOT / 'README.md']
  assert [page for page in pages if f': {page}\n' not in site] == []
  assert re.findall(r'^::: (.*)$', api, re.MULTILINE) == ['.'.join(place) for place in hbf._PUBLIC.values()]


@pytest.mark.parametrize('page', TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
  links = re.findall(r'\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)', TEXTS[page])
  broken = []
  for path, anchor in links:
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or (anchor and anchor not in anchors(TEXTS[target])):
      broken.append(f'{path}#{anchor}')
  assert broken == []


def anchors(text):
  """Return the anchors that GitHub gives to the headings of a page."""
  headings = re.findall(r'^#+ (.*)$', text, re.MULTILINE)
  return [re.sub(r'[^\w\- ]', '', heading).lower().replace(' ', '-') for heading in headings]


def commands():
  """Return the module and the arguments of every command in the pages."""
  found = [match.groups() for text in TEXTS.values() for match in COMMAND.finditer(text)]
  return sorted(
    {
      (module or COMMANDS[command or script][0], arguments.replace('\\\n', ' ').strip())
      for command, module, script, arguments in found
    }
  )


# Calls that define the flags of several commands, and the files with these flags.
SHARED = (
  ('cli.define_', 'cli/__init__'),
  ('.add_run(', 'arguments'),
  ('study.parser(', 'analysis/study'),
)


@pytest.fixture
def shift(tmp_path, monkeypatch):
  """Carry out a page's worked example: write its file, and register its stage by its line."""
  page = PAGES[ROOT / 'docs' / 'how-to' / 'add-a-stage.md']
  path = tmp_path / 'shift.py'
  path.write_text(re.search(r'```python\n(.*?)```', page, re.DOTALL)[1])
  specification = importlib.util.spec_from_file_location('shift', path)
  module = importlib.util.module_from_spec(specification)
  specification.loader.exec_module(module)
  name, stage = re.search(r"`'(\w+)': (\w+),`", page).groups()
  monkeypatch.setitem(registry.STAGE1, name, getattr(module, stage))
  return getattr(module, stage)


@pytest.fixture
def shapes(monkeypatch):
  """Register the data set of a user's own in the page about it."""
  page = PAGES[ROOT / 'docs' / 'how-to' / 'own-formats.md']
  monkeypatch.setattr('hbf.data.registry.REGISTERED', {})
  exec(re.search(r'`shapes\.py`:\n\n```python\n(.*?)```', page, re.DOTALL)[1], {})


@pytest.mark.parametrize(('module', 'arguments'), commands())
@pytest.mark.usefixtures('shift', 'shapes')  # on which commands train
def test_every_command_and_its_flags_exist(module, arguments, monkeypatch):
  monkeypatch.chdir(ROOT)
  flags = [argument for argument in shlex.split(arguments) if argument.startswith('--')]
  overrides = [flag for flag in flags if flag.startswith(('--config=', '--config.'))]
  if module in ('hbf.cli.train', 'hbf.cli.compile'):
    read_config(overrides or ['--config=digits'])  # refuses unknown keys
    flags = [flag for flag in flags if flag not in overrides]
  if module == 'hbf.cli.compare':  # overrides of every arm
    of_arms = [flag for flag in flags if flag.startswith('--config.')]
    read_config(['--config=cifar10', *of_arms])
    flags = [flag for flag in flags if flag not in of_arms]
  source = (ROOT / f'{module.replace(".", "/")}.py').read_text()
  for call, shared in SHARED:
    if call in source:
      source += (ROOT / 'hbf' / f'{shared}.py').read_text()
  unknown = [flag for flag in flags if not re.search(rf"'(--)?{re.split('=', flag[2:])[0]}'", source)]
  assert unknown == []


def test_the_stage_of_the_worked_example_sees_the_token_before(shift):
  tokens = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 4)), jnp.float32)
  variables = shift().init(jax.random.key(0), tokens)
  before, after = (shift().apply(variables, z) for z in (tokens, tokens.at[:, 1].add(1.0)))
  assert [bool(np.any(np.abs(z) > 1e-6)) for z in (after - before)[0]] == [False, True, True, False, False]


def test_the_stage_of_the_worked_example_trains_and_is_matched(shift, toy, tmp_path):
  config = toy('model=shift+mlp', **{'train.epochs': 3.0})
  budget = count_parameters(build_model(toy('model=vit').model, 10), (8, 8, 1))
  config.model = match_parameters(
    config.model, budget, lambda model: count_parameters(build_model(model, 10), (8, 8, 1))
  )
  result = train(config, tmp_path / 'run', QUIET, jax.devices()[:1])
  assert abs(result['params'] - budget) <= 0.01 * budget
  assert result['nll'] < 2.3  # of ten classes alike
