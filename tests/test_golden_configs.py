"""Every shipped config equals a committed file, so that no default changes unnoticed.

`python -m tests.test_golden_configs` writes the files again. Commit their changes with the change of a default.
"""

import json
import pathlib

import pytest

from hbf.config.command_line import read_config
from hbf.nn.registry import MODELS

FOLDER = pathlib.Path(__file__).parent / 'golden'
RECIPES = ('small', 'memo')
OTHER_DATA = ('cifar100', 'digits', 'image_folder')
GOLDEN = {
  **{f'{data}-hyperbf-{r}': f'{data}.py:recipe={r}' for data in OTHER_DATA for r in RECIPES},
  **{f'tiny_imagenet-{model}-memo': f'tiny_imagenet.py:model={model},recipe=memo' for model in ('hyperbf', 'vit')},
  **{f'cifar10-{model}-{r}': f'cifar10.py:model={model},recipe={r}' for model in MODELS for r in RECIPES},
  **{f'cifar10-{model}-size-tiny': f'cifar10.py:model={model},size=tiny' for model in ('hyperbf', 'vit', 'gmlp')},
  **{
    f'cifar10-{model}-laptop': f'cifar10.py:model={model},recipe=laptop'
    for model in ('hyperbf', 'positional', 'gated', 'vit', 'gmlp')
  },
  **{f'{data}-hyperbf-strong': f'{data}.py:recipe=strong' for data in ('cifar10', 'tiny_imagenet')},
  **{f'imagenet-{model}': f'imagenet.py:model={model}' for model in ('hyperbf', 'vit')},
  **{f'shakespeare-{model}-characters': f'shakespeare.py:model={model}' for model in ('hyperbf', 'vit', 'gmlp')},
  'text-hyperbf-characters': 'text.py',
  'text_file-hyperbf-characters': 'text_file.py',
  'imagenet-hyperbf-size-large': 'imagenet.py:size=large',
  'cifar10-vit-finetune': 'cifar10.py:model=vit,recipe=finetune',
  'cifar10-mixer-size-small': 'cifar10.py:model=mixer,size=small',
  'cifar10-softmax+hyperbf-small': 'cifar10.py:model=softmax+hyperbf',
}


def resolved_json(name: str) -> str:
  config = read_config([f'--config=configs/{GOLDEN[name]}'])
  return json.dumps(json.loads(config.to_json()), indent=1, sort_keys=True) + '\n'


@pytest.mark.parametrize('name', GOLDEN)
def test_no_default_changed_unnoticed(name: str) -> None:
  assert resolved_json(name) == (FOLDER / f'{name}.json').read_text()


def test_every_file_is_compared() -> None:
  assert {path.stem for path in FOLDER.iterdir()} == set(GOLDEN)


if __name__ == '__main__':
  FOLDER.mkdir(exist_ok=True)
  for name in GOLDEN:
    (FOLDER / f'{name}.json').write_text(resolved_json(name))
