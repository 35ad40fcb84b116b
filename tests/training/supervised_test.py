from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.training import optimizer as optimizers
from llamarl_jax.training import packing
from llamarl_jax.training import state as states
from llamarl_jax.training import supervised

_CONFIG = config_lib.LlamaConfig(
  vocab_size=8,
  width=16,
  num_layers=1,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  mlp_width=24,
  rope_theta=1e4,
)


class SupervisedTest(parameterized.TestCase):
  def test_loss_is_the_mean_over_completion_tokens(self):
    rows = supervised.supervised_trajectories(
      [((1,), (2, 3)), ((4, 5), (6,))], layout=packing.Layout(4), pad_token=0
    )
    np.testing.assert_array_equal(rows.tokens, [[1, 2, 3, 0], [4, 5, 6, 0]])
    log_probs = jnp.array([[-9.0, -1.0, -2.0, -9.0], [-9.0, -9.0, -4.5, -9.0]])
    output = supervised.supervised_loss(log_probs, jax.device_put(rows))
    self.assertEqual(float(output.loss.total), 7.5)
    self.assertEqual(float(output.loss.count), 3.0)

  def test_learns_a_rule_by_heart(self):
    examples = [((a,), (7 - a, a)) for a in range(1, 7)]
    rows = supervised.supervised_trajectories(
      examples, layout=packing.Layout(1), pad_token=0
    )
    optimizer = optimizers.make_optimizer(learning_rate=0.03)
    step = supervised.make_supervised_step(
      _CONFIG, optimizer, max_completion=2, num_micro_batches=1
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(
      lambda spec: np.float32(rng.normal(size=spec.shape) / 3),
      llama.abstract_params(_CONFIG),
    )
    state = states.init_train_state(params, optimizer)
    losses = []
    for _ in range(60):
      state, metrics = step(state, rows)
      losses.append(float(metrics['loss']))
    # At first no better than a guess among eight tokens, in the end certain.
    self.assertGreater(losses[0], 0.7 * np.log(8))
    self.assertLess(losses[-1], 0.05)
    self.assertEqual(int(state.batches_consumed), 60)


if __name__ == '__main__':
  absltest.main()
