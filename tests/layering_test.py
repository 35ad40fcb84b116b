"""Who may import whom: read off the syntax trees, nothing is run."""

import ast
import pathlib

import pytest

import llamarl_jax

ROOT = pathlib.Path(llamarl_jax.__file__).parent
# Layers from below; a folder imports from lower layers and itself only.
LAYERS = (
  ('types',),
  ('algorithms', 'scheduling', 'sharding', 'rewards'),
  ('models',),
  ('sampling', 'training', 'theory'),
  ('data', 'checkpoints', 'runtime'),
  ('channels',),
  ('executors',),
  ('controller',),
)
LEVEL = {name: i for i, names in enumerate(LAYERS) for name in names}
PURE = {name for names in LAYERS[:4] for name in names}
EFFECTS = {
  'absl',
  'asyncio',
  'logging',
  'ml_collections',
  'os',
  'pathlib',
  'queue',
  'random',
  'ray',
  'socket',
  'subprocess',
  'threading',
  'time',
}
FILES = sorted(ROOT.rglob('*.py'))


def _part(path: pathlib.Path) -> str:
  return path.relative_to(ROOT).parts[0].removesuffix('.py')


def _imports(tree: ast.Module) -> list[str]:
  modules = []
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      modules += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, 'imports are absolute'
      modules += [f'{node.module}.{alias.name}' for alias in node.names]
  return modules


def breaches(part: str, source: str) -> list[str]:
  """Returns what a file of the folder `part` does against the rules."""
  tree = ast.parse(source)
  found = []
  for module in _imports(tree):
    names = module.split('.')
    if part in PURE and names[0] in EFFECTS:
      found.append(f'pure, but imports {module}')
    if names[0] in ('configs', 'experiments', 'benchmarks', 'tests'):
      found.append(f'library, but imports {module}')
    if names[0] == 'llamarl_jax' and len(names) > 1:
      other = names[1]
      if other != part and LEVEL[other] >= LEVEL[part]:
        found.append(f'{part} may not import {other}')
    if names[0] == 'ml_collections' and part != 'controller':
      found.append('only the controller layer reads configs')
  for node in ast.walk(tree):
    if part in PURE and isinstance(node, ast.Call):
      name = getattr(node.func, 'id', None)
      if name in ('print', 'open'):
        found.append(f'pure, but calls {name}')
  return found


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_keeps_to_its_layer(path):
  part = _part(path)
  if part == '__init__':
    return
  assert breaches(part, path.read_text()) == []


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_and_functions_stay_small(path):
  source = path.read_text()
  assert source.count('\n') <= 400
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.FunctionDef):
      assert (node.end_lineno or 0) - node.lineno < 80, node.name


@pytest.mark.parametrize(
  ('part', 'source'),
  [
    ('algorithms', 'import time'),
    ('algorithms', 'from llamarl_jax.models import llama'),
    ('sampling', 'from llamarl_jax.training import step'),
    ('models', 'print(1)'),
    ('executors', 'import ml_collections'),
    ('controller', 'from configs import base'),
  ],
)
def test_a_breach_is_found(part, source):
  assert breaches(part, source)
