from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from benchmarks import train_steps
from benchmarks import workload
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama


class WorkloadTest(parameterized.TestCase):
  @parameterized.parameters(*workload.WORKLOADS)
  def test_sizes_are_those_of_the_model(self, name):
    shape = workload.WORKLOADS[name]
    self.assertEqual(
      workload.num_parameters(shape),
      config_lib.num_parameters(train_steps.llama_config(shape)),
    )

  def test_arithmetic_of_one_token(self):
    """2 multiply-adds a weight, and of attention one pair of tokens."""
    shape = workload.dataclasses.replace(
      workload.WORKLOADS['tiny'], rows=1, prompt=0, completion=1
    )
    norms = (2 * shape.num_layers + 1) * shape.width
    matrices = workload.num_parameters(shape) - norms
    # q k' and its product with v: A multiply-adds each in every head.
    pairs = shape.num_layers * 2 * 2 * shape.num_heads * shape.head_dim
    self.assertEqual(workload.forward_flops(shape), 2 * matrices + pairs)

  def test_weights_arrive_in_their_places(self):
    """One projection by hand: Hugging Face computes x W', heads in rows."""
    shape = workload.WORKLOADS['tiny']
    params = train_steps.load_params(shape)
    values = dict(workload.weights(shape))
    x = np.random.default_rng(0).standard_normal(shape.width)
    theirs = values['model.layers.1.self_attn.q_proj.weight'] @ x
    ours = np.einsum('d,dha->ha', x, params['layers']['attention']['query'][1])
    np.testing.assert_allclose(ours.reshape(-1), theirs, rtol=1e-5, atol=1e-6)
    abstract = llama.abstract_params(train_steps.llama_config(shape))
    self.assertEqual(
      [x.shape for x in jax.tree.leaves(params)],
      [x.shape for x in jax.tree.leaves(abstract)],
    )


if __name__ == '__main__':
  absltest.main()
