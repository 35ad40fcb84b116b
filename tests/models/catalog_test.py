"""Published sizes, against the published parameter counts."""

import dataclasses

from absl.testing import parameterized
import pytest

from llamarl_jax.models import catalog
from llamarl_jax.models import config as config_lib


class CatalogTest(parameterized.TestCase):
  @parameterized.parameters(
    # The model cards say 1.23B, 3.21B, 8B, 70B and 405B; exact counts are
    # those of the tensors in the released files.
    ('llama-3.2-1b', 1_235_814_400),
    ('llama-3.2-3b', 3_212_749_824),
    ('llama-3.1-8b', 8_030_261_248),
    ('llama-3.1-70b', 70_553_706_496),
    ('llama-3.1-405b', 405_853_388_800),
  )
  def test_has_the_published_number_of_parameters(self, name, count):
    self.assertEqual(config_lib.num_parameters(catalog.find(name)), count)

  def test_names_what_is_there(self):
    with pytest.raises(ValueError, match=r"'llama-4'.*'llama-3.1-405b'"):
      catalog.find('llama-4')

  def test_another_model_in_the_folder_is_refused(self):
    model = catalog.find('llama-3.1-8b')
    catalog.check('', model)
    catalog.check('llama-3.1-8b', dataclasses.replace(model, num_tokens=128000))
    with pytest.raises(
      ValueError, match=r'num_layers is 16, not 32.*rope_theta is 1.0, not'
    ):
      catalog.check(
        'llama-3.1-8b',
        dataclasses.replace(model, num_layers=16, rope_theta=1.0),
      )
