"""A hook of MkDocs: links from pages to files outside docs/ lead to copies of these files in the site."""

import pathlib
import posixpath
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
LINK = re.compile(r'(!?)\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)')


def on_page_markdown(markdown, page, config, files):
  """Copy every linked file outside docs/ into the site; a link to a folder becomes the folder's name."""

  def replace(match):
    image, text, path, anchor = match[1], match[2], match[3], match[4] or ''
    inside = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), path))
    if not inside.startswith('../'):
      return match[0]
    source = ROOT / inside.removeprefix('../')
    if not source.exists():
      raise FileNotFoundError(f'{page.file.src_uri} links to {source}, which is not there')
    if source.is_dir():
      return f'{text} (`{source.relative_to(ROOT)}`)'
    # Text files open in a browser with this ending; others keep theirs.
    name = f'files/{source.relative_to(ROOT)}' + ('.txt' if source.suffix in ('.py', '.md', '') else '')
    if not files.get_file_from_path(name):
      files.append(File.generated(config, name, content=source.read_bytes()))
    there = posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or '.')
    return f'{image}[{text}]({there}{"" if source.suffix == ".md" else anchor})'

  return LINK.sub(replace, markdown)
