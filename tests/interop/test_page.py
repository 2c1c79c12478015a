"""Tests that the examples of docs/how-to/fine-tune.md run on small files."""

import pathlib
import re

import numpy as np
from interop import others, test_nanogpt

from hbf.interop import tensors

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'how-to' / 'fine-tune.md'


def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  tensors.write(pathlib.Path('ViT-B_16.npz'), others.random_tensors(others.google_vit))
  tensors.write(pathlib.Path('ckpt.pt'), test_nanogpt.random_tensors())
  images = np.zeros((2, others.SIDE, others.SIDE, 3), np.float32)
  scope = {'images': images, 'tokens': test_nanogpt.make_texts()}
  first, second = re.findall(r'```python\n(.*?)```', PAGE.read_text(), re.DOTALL)
  exec(first, scope)
  assert scope['logits'].shape == (2, others.CLASSES)
  # The small network has fewer heads and a shorter context.
  exec(second.replace('heads=6', f'heads={test_nanogpt.HEADS}').replace('count=100', 'count=2'), scope)
  assert scope['logits'].shape == (2, test_nanogpt.LENGTH, test_nanogpt.V)
  assert [len(tokens) for tokens in scope['continued']] == [2, 2]
