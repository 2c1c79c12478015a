import io

import numpy as np
import pytest
import tensorflow_datasets as tfds
from archive_files import encode, write_zip
from PIL import Image

from hbf.data.datasets import load
from hbf.data.images.prepare import prepare
from hbf.data.pipeline.identity import identity
from hbf.errors import UserError


def test_images_labels_and_splits(tiny_members, tmp_path, offline):
  prepare('tiny_imagenet', str(tmp_path / 'tfds'), write_zip(tmp_path / 'a.zip', tiny_members))
  data = load(name='tiny_imagenet', dir=str(tmp_path / 'tfds'), root='', image_size=0, download=False)
  assert data.image_shape == (64, 64, 3)
  assert data.classes == tuple(sorted(data.classes)) and len(data.classes) == 200
  builder = tfds.builder_from_directory(tmp_path / 'tfds' / 'tiny_imagenet' / '1.0.0')
  labels = {f'val_{number}.JPEG': f'n{199 - number:08d}' for number in range(200)}
  for split, source in data.splits.items():
    records = builder.as_data_source(split, decoders={'image': tfds.decode.SkipDecoding()})
    assert len(source) == len(records) == 200
    for index, record in enumerate(records):
      name = record['id'].decode()
      image, label = source[index]
      assert data.classes[label] == labels.get(name, name.partition('_')[0])
      (member,) = [key for key in tiny_members if key.endswith(f'/{name}')]
      with Image.open(io.BytesIO(tiny_members[member])) as original:
        np.testing.assert_array_equal(image, np.asarray(original.convert('RGB')))
        assert (record['image'] == tiny_members[member]) == (original.mode == 'RGB')


def test_readers_are_told_words_and_the_data_stay_the_same(tiny_members, tmp_path, offline):
  words = 'n00000003\tbullfrog, Rana catesbeiana\nn00000004\tcrane, derrick\nn00000005\tcrane\nn99\tentity\n'
  found = []
  for text in ('', words):
    members = {**tiny_members, 'tiny-imagenet-200/words.txt': text.encode()}
    prepare('tiny_imagenet', str(tmp_path / f'tfds{len(text)}'), write_zip(tmp_path / 'a.zip', members))
    directory = str(tmp_path / f'tfds{len(text)}')
    found.append(load(name='tiny_imagenet', dir=directory, root='', image_size=0, download=False))
  without, told = found
  assert without.class_names == without.classes == told.classes
  assert told.class_names[:3] == told.classes[:3] and told.class_names[6:] == told.classes[6:]
  assert told.class_names[3:6] == ('bullfrog', 'crane (n00000004)', 'crane (n00000005)')
  said = identity(told)
  assert said.pop('names') == dict(zip(told.classes[3:6], told.class_names[3:6], strict=True))
  assert said | {'names': {}} == identity(without)


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('wnids.txt', None, 'lacks tiny-imagenet-200/wnids.txt'),
    ('words.txt', None, 'lacks tiny-imagenet-200/words.txt'),
    ('wnids.txt', b'n1\nn2', 'lists 2 classes in wnids.txt, not 200'),
    ('val_annotations.txt', b'val_0.JPEG\tn00000000\t0', 'lacks val images of n00000001'),
    ('train/n00000007/images/n00000007_0.JPEG', None, 'lacks train images of n00000007'),
    ('val/images/val_3.JPEG', None, 'lacks tiny-imagenet-200/val/images/val_3.JPEG'),
    ('val/images/val_3.JPEG', b'not an image', r'has a damaged image \S+val_3.JPEG'),
    ('val/images/val_3.JPEG', encode(np.zeros((32, 48, 3), np.uint8), 'JPEG'), 'has 48 x 32 pixels in'),
  ],
)
def test_a_wrong_layout_is_refused(name, content, message, tiny_members, tmp_path):
  (member,) = [key for key in tiny_members if key.endswith(name)]
  changed = {**tiny_members, member: content} if content is not None else dict(tiny_members)
  if content is None:
    del changed[member]
  archive = write_zip(tmp_path / 'a.zip', changed)
  with pytest.raises(UserError, match=rf'^{archive} {message}.*; expected tiny-imagenet-200.zip') as caught:
    prepare('tiny_imagenet', str(tmp_path / 'tfds'), archive)
  assert '\n' not in str(caught.value)
  assert not list((tmp_path / 'tfds').iterdir())


def test_cut_off_and_damaged_files_are_refused(tiny_members, tmp_path):
  write_zip(tmp_path / 'a.zip', tiny_members)
  whole = (tmp_path / 'a.zip').read_bytes()
  middle = whole.index(tiny_members['tiny-imagenet-200/val/images/val_5.JPEG']) + 100
  damaged = whole[:middle] + bytes(200) + whole[middle + 200 :]
  for content in (b'', b'no zip', whole[: len(whole) // 2], whole[:-30], damaged):
    (tmp_path / 'b.zip').write_bytes(content)
    with pytest.raises(UserError, match='is cut off, damaged or another kind of file'):
      prepare('tiny_imagenet', str(tmp_path / 'tfds'), str(tmp_path / 'b.zip'))
  assert not list((tmp_path / 'tfds').iterdir())
